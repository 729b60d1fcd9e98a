"""Exercises of notebook 14: ZeRO and FSDP."""

from __future__ import annotations

import math
import random
from functools import cache

import torch
from torch import nn

from by_hand.transport import threads
from by_hand.zero import Zero
from exercises.check import exercise
from exercises.comparisons import agree, over_ranks, same
from exercises.handout import observe


@exercise(
    "14.1",
    hints=[
        (
            "AdamW has 4 bytes of parameter, 4 of gradient and 8 of states for each parameter: "
            "which of them does each stage divide by the ranks?"
        ),
        (
            "Stage 1 divides the states, 2 also the gradients, 3 all. Go up from 0, and stop at "
            "the first that fits."
        ),
    ],
    why=(
        "A higher stage saves more and may send more: the lowest that leaves room for the "
        "activations is enough."
    ),
)
def _(answer):
    agree(
        answer,
        _lowest,
        [
            (8, 4, 128),
            (8, 4, 127),
            (8, 4, 80),
            (8, 4, 79),
            (8, 4, 56),
            (8, 4, 55),
            (8, 4, 32),
            (8, 4, 31),
            (12, 1, 192),
            (12, 1, 191),
        ],
        _some_room,
    )


def _lowest(parameters: int, ranks: int, room: int) -> int | str:
    stages = [stage for stage in range(4) if _most_held(parameters, ranks, stage) <= room]
    return stages[0] if stages else "none"


@cache
def _most_held(parameters: int, ranks: int, stage: int) -> int:
    """Counted, not computed: what a rank of the course's own class holds before its update."""

    class AddsItsSum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(parameters))

        def forward(self, value):
            return value + self.weight.sum()

    def work(transport):
        zero = Zero(transport, [AddsItsSum()], stage)
        zero.step([(torch.zeros(1), torch.zeros(1))], lambda out, target: (out - target).sum())
        last = [moment for moment in zero.moments if moment.event in ("reduce", "drop")][-1]
        return last.parameters + last.gradients + zero.held()["optimizer states"]

    return max(threads(ranks, work)[0])


def _some_room(rng: random.Random) -> tuple[int, int, int]:
    ranks = rng.randint(2, 6)
    parameters = ranks * rng.randint(1, 20)
    return parameters, ranks, rng.randint(2 * parameters, 18 * parameters)


@exercise(
    "14.2",
    hints=[
        (
            "The norm of the whole is the root of a sum of squares: "
            "which number can each rank give to that sum?"
        ),
        (
            "Square, sum, ring_all_reduce of that one number, then the root; "
            "scale only when it is above `most`."
        ),
    ],
    why=(
        "It is what clip_grad_norm_ does with DTensors. "
        "A rank that clips by its own norm makes another step than the others."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of a transport, a piece and a norm"
    for ranks, lengths, most in (
        (2, (3, 4), 1.0),
        (3, (5, 0, 2), 0.5),
        (1, (6,), 1.0),
        (4, (2, 2, 2, 1), 100.0),
        (5, (1, 9, 4, 4, 0), 2.0),
    ):
        generator = torch.Generator().manual_seed(ranks)
        pieces = [torch.randn(length, generator=generator) for length in lengths]
        norm = torch.cat(pieces).norm()

        given, sent, _, _ = observe(over_ranks, answer, [(piece.clone(), most) for piece in pieces])
        case = (
            f"{ranks} ranks, pieces of {', '.join(map(str, lengths))} numbers and at most {most:g}"
        )
        for rank, piece in enumerate(pieces):
            assert isinstance(given[rank], torch.Tensor), (
                f"with {case} your function should give a tensor on every rank"
            )
            same(
                given[rank],
                piece * min(1.0, most / norm.item()),
                rel=1e-5,
                what=f"the piece of rank {rank} with {case}",
            )
        for rank in range(ranks):
            assert sent[rank] <= 8 * 2 * ranks, (
                f"with {case} rank {rank} sends {sent[rank]} bytes: one number is enough"
            )


@exercise(
    "14.3",
    hints=[
        "Joined along the first dimension, the shards are the whole tensor again: torch.cat.",
        (
            "chunk(ranks) gives rows / ranks to each, rounded up, so that it can give fewer pieces "
            "than there are ranks: add empty ones, whole[:0]."
        ),
    ],
    why=(
        "torch.distributed.checkpoint does so without ever holding the whole: "
        "each rank reads the saved pieces that overlap its own."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of a list of tensors and a number"
    for shape, before, ranks in (
        ((8,), 4, 2),
        ((12, 3), 2, 3),
        ((5, 2), 4, 3),
        ((6, 2), 3, 4),
        ((3, 2, 2), 1, 5),
        ((7,), 5, 1),
    ):
        whole = torch.arange(float(math.prod(shape))).view(shape)
        same(
            answer(_shards(whole, before), ranks),
            _shards(whole, ranks),
            what=f"the list of {ranks} shards of a tensor of shape {shape}, from {before} ranks,",
        )


def _shards(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    most = -(-len(whole) // ranks)
    return [whole[rank * most : (rank + 1) * most] for rank in range(ranks)]


@exercise(
    "14.4",
    hints=[
        (
            "Go through a step: which collectives happen once per step, "
            "and which once per micro-batch? An all-reduce is two Ψ, a half of a ring one."
        ),
        (
            "Stage 1 scatters once and gathers once. Stage 2 scatters every time. "
            "In 2.5 each micro-batch has one gather and one scatter, in 3 two gathers and one."
        ),
    ],
    why="With many micro-batches stage 1 is the cheapest on a slow link, whatever the memory says.",
)
def _(answer):
    agree(
        answer,
        _psis,
        [(0, 1), (1, 1), (2, 1), (3, 1), (2, 4), (1, 4), (2.5, 1), (2.5, 3), (0, 5)],
        lambda rng: (rng.choice((0, 1, 2, 2.5, 3)), rng.randint(1, 6)),
        rel=1e-9,
    )


def _psis(stage: float, micro: int) -> float:
    """Counted on the transports of the course's own class.

    Stage 2.5 is stage 3 less one gather per micro-batch.
    """
    if stage == 2.5:
        return _psis(3, micro) - micro
    ranks = 2

    def work(transport):
        zero = Zero(
            transport,
            [nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)],
            int(stage),
        )
        zero.step(
            [(torch.ones(1, 3), torch.ones(1, 1))] * micro,
            lambda out, target: (out - target).square().sum(),
        )

    _, transports = threads(ranks, work)
    length = 12 + 9 + 3
    return sum(transport.bytes_sent for transport in transports) / (4 * length * (ranks - 1))

"""Exercises of notebook 24: long context and experts."""

from __future__ import annotations

import math
import random

import torch

from exercises.check import exercise
from exercises.comparisons import agree, same


@exercise(
    "24.1",
    hints=[
        "A sum that was taken relative to a lower maximum must shrink by exp(lower - higher).",
        (
            "Weight each part by w = exp(its logsumexp - the logsumexp of both together); "
            "the outputs are averages already, so add w times each."
        ),
    ],
    why="Attention over any number of blocks is a fold of this: the ring adds one block per hop.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of two outputs and two logsumexps"
    for seed, scale in enumerate((1.0, 1.0, 30.0, 4000.0)):
        generator = torch.Generator().manual_seed(seed)
        scores = scale * torch.randn(5, 9, generator=generator, dtype=torch.float64)
        values = torch.randn(9, 3, generator=generator, dtype=torch.float64)
        cut = 2 + seed
        outputs, sums = zip(
            *(
                (part.softmax(-1) @ kept, part.logsumexp(-1))
                for part, kept in (
                    (scores[:, :cut], values[:cut]),
                    (scores[:, cut:], values[cut:]),
                )
            )
        )
        given = answer(outputs[0].clone(), sums[0].clone(), outputs[1].clone(), sums[1].clone())
        assert isinstance(given, (tuple, list)) and len(given) == 2, (
            "your function should give back two tensors, the output and the logsumexp"
        )
        where = f"with scores of about {scale:g}"
        same(given[0], scores.softmax(-1) @ values, what=f"the output {where}")
        same(given[1], scores.logsumexp(-1), what=f"the logsumexp {where}")


@exercise(
    "24.2",
    hints=[
        "With zig-zag a rank has two of 2N parts. How many keys may the token at place p see?",
        (
            "A token at place p sees p + 1 keys, itself included. "
            "Add that up over the places that the rank holds."
        ),
    ],
    why="The slowest rank sets the time of a step: one part each would let most ranks wait.",
)
def _(answer):
    agree(
        answer,
        _pairs,
        [(8, 2, 0, False), (8, 2, 1, False), (8, 2, 0, True), (8, 2, 1, True), (16, 1, 0, True)],
        _some_split,
        rel=1e-9,
    )


def _pairs(tokens: int, ranks: int, rank: int, zigzag: bool) -> int:
    """Counted, in the matrix of what each token may see."""
    visible = torch.ones(tokens, tokens).tril()
    if zigzag:
        parts = visible.chunk(2 * ranks)
        return int(parts[rank].sum() + parts[2 * ranks - 1 - rank].sum())
    return int(visible.chunk(ranks)[rank].sum())


def _some_split(rng: random.Random) -> tuple[int, int, int, bool]:
    ranks = rng.randint(2, 6)
    return 2 * ranks * rng.randint(1, 9), ranks, rng.randrange(ranks), rng.random() < 0.5


@exercise(
    "24.3",
    hints=[
        "How many seats has each expert? Round up.",
        "An expert that was chosen more often than it has seats drops the difference.",
    ],
    why="What was dropped passes only through the residual connection: the model learns less.",
)
def _(answer):
    agree(
        answer,
        _dropped,
        [([3, 1, 0, 0], 1.0), ([3, 1, 0, 0], 2.0), ([5, 5], 1.0), ([7, 1, 1], 1.25)],
        _some_counts,
        rel=1e-9,
    )


def _dropped(chosen: list[int], capacity: float) -> int:
    """Counted, pair by pair."""
    seats = math.ceil(capacity * sum(chosen) / len(chosen))
    dropped = 0
    for count in chosen:
        for place in range(count):
            dropped += place >= seats
    return dropped


def _some_counts(rng: random.Random) -> tuple[list[int], float]:
    experts = rng.randint(2, 16)
    return [rng.randint(0, 40) for _ in range(experts)], rng.choice((0.5, 1.0, 1.25, 1.5, 2.0))

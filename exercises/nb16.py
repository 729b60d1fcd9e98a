"""Exercises of notebook 16: tensor parallel."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from by_hand.exchange import Ring
from by_hand.tensor import MLP
from by_hand.transport import Transport, threads
from exercises.check import exercise
from exercises.comparisons import agree, close, over_ranks, same
from exercises.handout import observe


@exercise(
    "16.1",
    hints=[
        (
            "How many all-reduces has a layer, and of what size? "
            "What does a rank send in a ring all-reduce of S bytes?"
        ),
        (
            "Four per layer (two pairs, each with one forward and one backward), "
            "of rows x tokens x hidden numbers; 2 (N-1)/N of that each."
        ),
    ],
    why=(
        "It grows with the examples and tokens, not with the parameters: "
        "the reverse of data parallel."
    ),
)
def _(answer):
    agree(
        answer,
        _bytes,
        [(1, 1, 4, 8, 4, 8), (2, 2, 4, 8, 2, 8), (3, 2, 6, 4, 3, 4), (2, 1, 2, 8, 1, 4)],
        _some_model,
        rel=1e-9,
    )


def _bytes(layers: int, rows: int, tokens: int, hidden: int, ranks: int, itemsize: int) -> int:
    """Counted, not computed: what layers of two pairs really send."""
    kind = {4: torch.float32, 8: torch.float64}[itemsize]
    pairs = [
        (nn.Linear(hidden, 8, dtype=kind), nn.Linear(8, hidden, dtype=kind))
        for _ in range(2 * layers)
    ]

    def work(transport: Transport) -> None:
        x = torch.zeros(rows, tokens, hidden, dtype=kind, requires_grad=True)
        for up, down in pairs:
            x = x + MLP(up, down, Ring(transport))(x)
        x.sum().backward()

    return threads(ranks, work)[1][0].bytes_sent


def _some_model(rng: random.Random) -> tuple[int, ...]:
    ranks = rng.choice((1, 2, 3, 4))
    return (
        rng.randint(1, 3),
        rng.randint(1, 3),
        rng.randint(1, 4),
        12 * rng.randint(1, 2),
        ranks,
        rng.choice((4, 8)),
    )


@exercise(
    "16.2",
    hints=["How often is the bias in the colleague's sum?", "Add it once, after the all-reduce."],
    why="In the sum it counts N times, and more ranks make another model.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of a transport, x, weight and bias"
    for ranks, inputs, out in ((1, 4, 3), (2, 6, 5), (3, 7, 4), (4, 8, 6)):
        generator = torch.Generator().manual_seed(ranks)
        x, weight, bias = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((2, 5, inputs), (out, inputs), (out,))
        )

        slices = list(zip(x.tensor_split(ranks, -1), weight.tensor_split(ranks, -1)))

        outputs, sent, _, _ = observe(over_ranks, answer, [(*part, bias) for part in slices])
        for rank, given in enumerate(outputs):
            assert isinstance(given, torch.Tensor), (
                "your function should give a tensor on every rank"
            )
            same(given, F.linear(x, weight, bias), what=f"the output of rank {rank} of {ranks}")
        needed = 2 * (ranks - 1) * 2 * 5 * out * 8
        assert sum(sent) == needed, (
            f"with {ranks} ranks {sum(sent)} bytes are sent, "
            f"and one all-reduce of the output is {needed}"
        )


@exercise(
    "16.3",
    hints=[
        (
            "Each rank knows the largest of its own logits and its word. "
            "What do the ranks need of each other to find the largest of all?"
        ),
        (
            "First the maximum over the ranks; then, of the words whose logit is that maximum, "
            "the smallest: a rank that has none offers a number larger than any word."
        ),
    ],
    why="The whole vocabulary is never in one place, in training or afterwards.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of a transport, logits and begin"
    for ranks, words, levels in ((1, 5, 9), (2, 9, 99), (3, 20, 3), (4, 30, 2), (5, 31, 99)):
        generator = torch.Generator().manual_seed(words)
        logits = torch.randint(-levels, levels, (2, 7, words), generator=generator).double() - 1000
        parts = logits.tensor_split(ranks, -1)
        begins = [0, *itertools.accumulate(part.shape[-1] for part in parts)]

        outputs, sent, _, _ = observe(over_ranks, answer, list(zip(parts, begins)))
        case = f"{words} words on {ranks} ranks"
        truth = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        for given in outputs:
            assert isinstance(given, torch.Tensor) and given.dtype == torch.int64, (
                f"with {case} your function should give int64 words on every rank"
            )
            same(given.double(), truth.double(), what=f"the words with {case}")
        most = max(sent)
        assert most <= 4 * (ranks - 1) * 14 * 8, (
            f"with {case} a rank sends {most / 14 / 8:g} numbers per token, "
            f"and 4 (N-1) = {4 * (ranks - 1)} are allowed"
        )


@exercise(
    "16.4",
    hints=[
        "Without checkpointing there are four. Which ones run a second time?",
        (
            "The second forward pass would have two more. "
            "But does the backward pass need what comes out of the last one?"
        ),
    ],
    why=(
        "The second pass stops before the layer's last all-reduce: "
        "nothing that was saved comes after it."
    ),
)
def _(answer):
    close(answer, _with_checkpointing(), rel=1e-6, unit="all-reduces")


@lru_cache
def _with_checkpointing() -> int:
    """Counted, in a layer of two pairs on two ranks."""
    pairs = [(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2)]

    def work(transport: Transport) -> int:
        exchange, norms = Ring(transport), [nn.LayerNorm(4) for _ in pairs]
        parts, calls = [MLP(*pair, exchange) for pair in pairs], []
        plain = exchange.reduce
        exchange.reduce = lambda *args: calls.append(1) or plain(*args)

        def layer(x):
            for norm, part in zip(norms, parts):
                x = x + part(norm(x))
            return x

        checkpoint(
            layer, torch.zeros(1, 2, 4, requires_grad=True), use_reentrant=False
        ).sum().backward()
        return len(calls)

    return threads(2, work)[0][0]

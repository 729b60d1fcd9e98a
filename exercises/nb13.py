"""Exercises of notebook 13: data parallel."""

from __future__ import annotations

import random

import torch

from by_hand.transport import Transport
from exercises.check import exercise
from exercises.comparisons import agree, close, over_ranks, same
from exercises.handout import observe

Events = list[tuple[str, int]]


@exercise(
    "13.1",
    hints=[
        "Each rank sends 2 (N-1) pieces of 1/N of the gradient: how many seconds is that?",
        "The backward pass hides as much as it lasts; a step never waits less than 0 seconds.",
    ],
    why="Less of the batch per rank shortens what can hide the messages, and not the messages",
)
def _(answer):
    agree(
        answer,
        _exposed,
        [(7e8, 2, 12e9, 0.5), (7e8, 8, 125e6, 0.05), (7e8, 1, 125e6, 0.05), (4e9, 4, 12e9, 0.0)],
        lambda rng: (
            rng.uniform(1e8, 1e10), rng.randint(1, 64), rng.uniform(1e8, 1e11), rng.uniform(0, 0.5)
        ),
        times=12,
    )  # fmt: skip


def _exposed(size: float, ranks: int, bandwidth: float, backward: float) -> float:
    return max(0.0, 2 * (ranks - 1) / ranks * size / bandwidth - backward)


@exercise(
    "13.2",
    hints=[
        (
            "Piece p should end at rank p and moves to the left: at which rank must it begin, "
            "and so which piece does a rank send first?"
        ),
        (
            "In step s a rank sends piece (rank + 1 + s) % ranks to the left "
            "and adds what comes from the right to piece (rank + 2 + s) % ranks."
        ),
    ],
    why="It is torch's reduce_scatter: what sharded training keeps of an all-reduce.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of a transport and a tensor"
    for ranks, length in ((4, 8), (1, 5), (2, 3), (3, 10), (5, 4), (8, 20)):
        case = f"{ranks} ranks and {length} numbers"
        generator = torch.Generator().manual_seed(ranks)
        tensors = [torch.randint(-99, 99, (length,), generator=generator) for _ in range(ranks)]

        given, sent, messages, after = observe(
            _to_the_left, answer, [(tensor.clone(),) for tensor in tensors]
        )
        assert all(torch.equal(now, then) for (now,), then in zip(after, tensors)), (
            f"with {case} your function changes its tensor: pieces are views until you clone them"
        )
        for rank, truth in enumerate(torch.stack(tensors).sum(0).tensor_split(ranks)):
            assert isinstance(given[rank], torch.Tensor), (
                f"with {case} your function should give a tensor on every rank"
            )
            same(given[rank], truth, what=f"the piece of rank {rank} with {case}")
        for rank in range(ranks):
            assert messages[rank] == ranks - 1, (
                f"with {case} rank {rank} sends {messages[rank]} messages instead of {ranks - 1}"
            )
            assert sent[rank] <= 8 * (length - length // ranks), (
                f"with {case} rank {rank} sends {sent[rank]} bytes: one piece per message is less"
            )


def _to_the_left(answer, arguments: list[tuple]):
    return over_ranks(lambda transport, tensor: answer(_OnlyLeft(transport), tensor), arguments)


class _OnlyLeft(Transport):
    """A transport on which messages go to the left neighbour only."""

    def __init__(self, transport: Transport):
        super().__init__(transport.rank, transport.ranks)
        self._transport = transport

    def send(self, tensor: torch.Tensor, to: int) -> None:
        left = (self.rank - 1) % self.ranks
        assert to == left, (
            f"rank {self.rank} of {self.ranks} may send only to rank {left}, not to {to}"
        )
        self._transport.send(tensor, to)

    def receive(self, like: torch.Tensor, of: int) -> torch.Tensor:
        right = (self.rank + 1) % self.ranks
        assert of == right, (
            f"rank {self.rank} of {self.ranks} can receive only from rank {right}, not from {of}"
        )
        return self._transport.receive(like, of)


@exercise(
    "13.3",
    hints=[
        (
            "What does one example of the third rank weigh in a mean of three means, "
            "and what in a mean over all examples?"
        ),
        "One sixth, against one eighteenth.",
    ],
    why="The sum, divided by all examples, times ranks gives every example its weight.",
)
def _(answer):
    close(answer, (1 / 3 / 2) / (1 / 18), rel=1e-3, unit="times")


@exercise(
    "13.4",
    hints=[
        "Count the updates made so far; remember the count at which each worker pulled.",
        (
            "A push is stale by the count before it minus the count at its worker's last pull; "
            "then the count goes up by one."
        ),
    ],
    why="With N workers of one speed it is N-1 for nearly all of them.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of the list of events"
    rng = random.Random(13)
    for workers in (1, 2, 4, 4, 9):
        events = _events(rng, workers)
        given = answer(list(events))
        assert isinstance(given, list), "your function should give back a list"
        truth = _staleness(events)
        assert len(given) == len(truth), (
            f"your function gives {len(given)} numbers for {len(truth)} pushes"
        )
        same(
            [float(value) for value in given],
            [float(value) for value in truth],
            what=f"the staleness with {workers} workers",
        )


def _staleness(events: Events) -> list[int]:
    updates, pulled, stale = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulled[worker] = updates
        else:
            stale.append(updates - pulled[worker])
            updates += 1
    return stale


def _events(rng: random.Random, workers: int) -> Events:
    """Workers that sometimes pull twice before they push, or push twice after one pull."""
    events = [("pull", worker) for worker in range(workers)]
    for _ in range(12 * workers):
        worker = rng.randrange(workers)
        events.append(("push", worker) if rng.random() < 0.6 else ("pull", worker))
    return events

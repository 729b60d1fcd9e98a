"""Exercises of notebook 10: uniform dynamic padding."""

from __future__ import annotations

import random
import statistics

import torch

from exercises.check import exercise
from exercises.comparisons import close, letters, same
from helpers.batching import cut, padded_share

DOCUMENTS = (10, 250, 20, 240, 30, 230, 40, 220)  # tokens, exercise 1
BIASED = {  # of exercise 3: why each of these is no unbiased first step
    "A": "A always begins with the shortest documents",
    "B": "B never shows the longest documents: what it drops is not random",
    "C": "C always begins with the shortest documents of its first window",
}


@exercise(
    "10.1",
    hints=[
        (
            "A batch of two padded to w tokens has 2 w * w scores. "
            "Add that up over the four batches, for both orders."
        ),
        "Sorted, the batches are (10, 20), (30, 40), (220, 230), (240, 250).",
    ],
    why=(
        "Scores fall further than tokens do, "
        "since they grow with the square of the padded length; "
        "what is left is the long documents' own."
    ),
)
def _(answer):
    close(answer, _scores(DOCUMENTS) / _scores(sorted(DOCUMENTS)), rel=0.005)


@exercise(
    "10.4",
    hints=[
        (
            "random.Random(seed).shuffle the numbers of the examples; "
            "cut them into windows of window * batch_size; sort each window by length; "
            "cut it into batches."
        ),
        (
            "Then shuffle the batches of all windows together, with the same generator, "
            "or every window begins with its shortest examples."
        ),
    ],
    why="These properties are all that a training loop asks of a sampler; the rest is taste.",
)
def _(answer):
    assert callable(answer), (
        "your answer should be a function of lengths, batch_size, window and seed"
    )
    generator = random.Random(5)
    for count, size, window in (
        (64, 4, 4),
        (61, 4, 3),
        (7, 8, 2),
        (48, 6, 100),
        (30, 1, 5),
        (40, 5, 1),
    ):
        lengths = [generator.randint(1, 200) for _ in range(count)]
        _check_partition(answer(list(lengths), size, window, 1), count, size)
    lengths = [generator.randint(1, 256) for _ in range(512)]
    epochs = [answer(list(lengths), 8, 16, seed) for seed in range(40)]
    for batches in epochs[:3]:
        _check_partition(batches, 512, 8)
    assert _plain(answer(list(lengths), 8, 16, 0)) == _plain(epochs[0]), (
        "the same seed should give the same batches in the same order"
    )
    assert _plain(epochs[0]) != _plain(epochs[1]), "another seed should give another order"
    _check_padding(answer, lengths, epochs)
    groups = [{frozenset(map(int, batch)) for batch in batches} for batches in epochs[:2]]
    assert len(groups[0] & groups[1]) < 8, (
        "the same examples meet in every epoch: shuffle them before you sort them, window by window"
    )
    _check_unbiased(lengths, epochs)


@exercise(
    "10.2",
    hints=[
        "Join the batches to one list, order: the value at index i belongs to example order[i].",
        (
            "back = torch.empty_like(values); back[order] = values. "
            "Indexing values[order] is the inverse of what you need."
        ),
    ],
    why=(
        "values[order] is right for orders that are their own inverse, such as reversed ones, "
        "and so passes a careless test."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of values and batches"
    generator = torch.Generator().manual_seed(4)
    for count, size, shape in (
        (10, 3, ()),
        (17, 4, (5,)),
        (1, 1, ()),
        (12, 12, (2, 3)),
        (9, 2, (1,)),
    ):
        order = torch.randperm(count, generator=generator).tolist()
        truth = torch.randn(count, *shape, generator=generator)
        given = truth[order]
        kept = given.clone()
        values = answer(given, cut(order, size))
        assert torch.equal(given, kept), (
            "your function changes the values that it is given: return a new tensor"
        )
        same(values, truth, what=f"the result for {count} examples in batches of {size}")


@exercise(
    "10.3",
    hints=[
        (
            "Follow the shortest and the longest document: can each be in the first batch, "
            "and as likely as any other?"
        ),
        (
            "Sorting inside a batch changes no gradient; "
            "what is dropped after sorting is always the same kind of document."
        ),
    ],
    why=(
        "Bias hides in what comes first and in what is left out, "
        "and neither shows in the share of padding."
    ),
)
def _(answer):
    answer = letters(answer, "ABCDE")
    biased = sorted(answer & BIASED.keys())
    assert not biased, BIASED[biased[0]]
    assert answer == {"D", "E"}, "what you name is right, but not all that is"


def _scores(lengths) -> int:
    return sum(2 * max(pair) ** 2 for pair in cut(lengths, 2))


def _plain(batches) -> list[list[int]]:
    return [[int(index) for index in batch] for batch in batches]


def _check_partition(batches, count: int, size: int) -> None:
    assert isinstance(batches, (list, tuple)), "your function should return a list of batches"
    batches = _plain(batches)
    assert sorted(index for batch in batches for index in batch) == list(range(count)), (
        f"with {count} examples in batches of {size} not every example comes exactly once"
    )
    sizes = sorted(map(len, batches))
    different = ", ".join(map(str, sorted(set(sizes))))
    assert len(batches) == -(-count // size) and set(sizes[1:]) <= {size}, (
        f"with {count} examples all batches but one should have {size}, and yours have {different}"
    )


def _check_padding(answer, lengths: list[int], epochs) -> None:
    share = statistics.mean(padded_share(_plain(batches), lengths, 1) for batches in epochs[:5])
    single = statistics.mean(
        padded_share(_plain(answer(list(lengths), 8, 1, seed)), lengths, 1) for seed in range(5)
    )
    assert share < 0.12, (
        f"with windows of 16 batches {share:.0%} is padding: "
        "are the examples sorted inside each window?"
    )
    assert single > 0.35, (
        f"with windows of one batch only {single:.0%} is padding: "
        "examples should be sorted inside their window and no further"
    )


def _check_unbiased(lengths: list[int], epochs) -> None:
    usual = statistics.mean(lengths)
    for name, position in (("first", 0), ("last", -1)):
        there = statistics.mean(
            statistics.mean(lengths[index] for index in _plain(batches)[position])
            for batches in epochs
        )
        assert abs(there / usual - 1) < 0.3, (
            f"over 40 seeds the {name} batch has {there:.0f} tokens per example on average, "
            f"and all examples have {usual:.0f}: the order of the batches tells their length"
        )

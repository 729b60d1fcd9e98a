"""Exercises of notebook 10: uniform dynamic padding."""

from __future__ import annotations

import random
import statistics

from by_hand.padding import padded_share
from exercises.check import exercise
from exercises.comparisons import agree, letters
from tight_fit.checks import IGNORE

BIASED = {  # of exercise 3: why each of these is no unbiased first step
    "A": "A always begins with the shortest texts",
    "B": "B never shows the longest texts: what it drops is not random",
    "C": "C always begins with the shortest texts of its first window",
}


def _in_budget(lengths: list[int], order: list[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for text in order:
        longest = max([lengths[text], *(lengths[t] for t in batches[-1])]) if batches else 0
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
        batches[-1].append(text)
    return batches


def _some_texts(rng: random.Random) -> tuple:
    lengths = [rng.randint(1, 50) for _ in range(rng.randint(2, 12))]
    return lengths, rng.sample(range(len(lengths)), len(lengths)), rng.randint(40, 150)


@exercise(
    "10.1",
    hints=[
        "Keep a current batch and its longest text; a batch costs its texts times its longest.",
        (
            "Before you add a text, take the new longest: if (len(batch) + 1) * longest > budget, "
            "close the batch and begin another one with this text."
        ),
    ],
    why="The budget bounds the memory of every step, which a number of texts does not",
)
def _(answer):
    agree(
        answer,
        _in_budget,
        examples=[
            ([6, 21, 12, 15], [0, 2, 3, 1], 45),
            ([10, 10, 30], [0, 1, 2], 30),
            ([50, 5], [0, 1], 20),
        ],
        draw=_some_texts,
    )


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


def _labels(texts: list[tuple[list[int], list[int]]]) -> list[int]:
    row = []
    for prompt, answer in texts:
        labels = [IGNORE] * len(prompt) + list(answer)
        row += [IGNORE, *labels[1:]]
    return row


def _texts(rng: random.Random) -> tuple:
    def tokens(least: int) -> list[int]:
        return [rng.randint(1, 99) for _ in range(rng.randint(least, 5))]

    return ([(tokens(0), tokens(1)) for _ in range(rng.randint(1, 4))],)


@exercise(
    "10.2",
    hints=[
        "The labels of a text are -100 for its prompt, then its answer; join those of all texts.",
        "After that, set the label at the first place of each text to -100, whatever it was.",
    ],
    why="Otherwise a text's first token is learned as a continuation of another text",
)
def _(answer):
    agree(
        answer,
        _labels,
        examples=[
            ([([5, 6], [7, 8])],),
            ([([5], [7]), ([], [8, 9, 4])],),
            ([([], [3])],),
        ],
        draw=_texts,
    )


@exercise(
    "10.3",
    hints=[
        (
            "Follow the shortest and the longest text: can each be in the first batch, "
            "and as likely as any other?"
        ),
        (
            "Sorting inside a batch changes no gradient; "
            "what is dropped after sorting is always the same kind of text."
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

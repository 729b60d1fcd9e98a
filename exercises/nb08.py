"""Exercises of notebook 08: feeding the GPU."""

from __future__ import annotations

import random

from exercises.check import exercise
from exercises.comparisons import agree, close, whole_number
from helpers.plan import plan
from helpers.recipe import Recipe

LETTERS, LONGEST = 20, 16  # of exercise 4
SPEED = 400e12  # FLOPs per second, of exercise 1


@exercise(
    "08.4",
    hints=[
        (
            "From its first letter on there are 16 substrings to look up. "
            "How many from the sixth, where 15 letters are left?"
        ),
        "Five starts with 16 lookups each, then 15 + 14 + ... + 1.",
    ],
    why=(
        "The work grows with the word's length times the longest piece, "
        "and the ways to cut the word double with every letter."
    ),
)
def _(answer):
    answer = whole_number(answer, "lookups")
    truth = sum(min(LONGEST, LETTERS - start) for start in range(LETTERS))
    assert answer != 2 ** (LETTERS - 1), (
        "that is the number of ways to cut the word, which nobody has to try one by one"
    )
    assert answer != LETTERS * LONGEST, (
        "near the end of the word fewer letters are left than the longest piece has"
    )
    assert answer == truth, (
        f"{answer} lookups are too {'many' if answer > truth else 'few'}: count them start by start"
    )


@exercise(
    "08.3",
    hints=[
        (
            "In turns the GPU waits for make / (make + step) of the time. "
            "With n workers a batch is ready every make / n seconds: how long does a step take?"
        ),
        (
            "A step takes longest = max(step, make / n), and the GPU waits for 1 - step / longest "
            "of it. Try 0, then 1, 2, ... until that is at most share."
        ),
    ],
    why="Each worker costs memory and a core, so decide first how much waiting you mind",
)
def _(answer):
    agree(
        answer,
        _workers,
        [(2, 3, 0.05), (6, 3, 0.05), (7, 1, 0.0), (0.1, 10, 0.05), (7, 3, 0.5), (3, 3, 0.6)],
        lambda rng: (rng.uniform(0.01, 2), rng.uniform(0.05, 0.5), rng.uniform(0.01, 0.4)),
        times=12,
    )


def _workers(make: float, step: float, share: float) -> int:
    if make / (make + step) <= share:
        return 0
    count = 1
    while 1 - step / max(step, make / count) > share:
        count += 1
    return count


@exercise(
    "08.1",
    hints=[
        (
            "How long does the GPU take for a step? The plan's FLOPs, all phases together, "
            "over the GPU's FLOPs per second."
        ),
        "In that time the tokens of the next step, 16 x 256, must be ready.",
    ],
    why=(
        "Compare it with the tokens per second that the lesson measures: "
        "is one process on your machine enough?"
    ),
)
def _(answer):
    recipe = Recipe("deberta", profile="full", batch_size=16, length=256)
    seconds = sum(plan(recipe).flops.values()) / SPEED
    close(answer, recipe.batch_size * recipe.tokens / seconds, rel=0.03, unit="tokens per second")


@exercise(
    "08.2",
    hints=[
        (
            "Special tokens have the word id None; "
            "a token that continues a word has the word id of the token before it."
        ),
        (
            "Go through the word ids with the one before at hand: "
            "-100 for None and for a repeated id, else labels[id]."
        ),
    ],
    why=(
        "-100 is what PyTorch's cross entropy leaves out, so each word counts once, "
        "however many pieces it has."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of word_ids and labels"
    agree(
        lambda word_ids, labels: list(answer(word_ids, labels)),
        _align,
        [
            ([None, 0, 1, 1, 2, None], [5, 6, 7]),
            ([None, 0, 0, 0, None], [3]),
            ([None, None], []),
            ([None, 0, 1, 1, None], [4, 4, 9, 2]),
        ],
        _some_words,
    )


def _align(word_ids: list[int | None], labels: list[int]) -> list[int]:
    before = [None, *word_ids]
    return [
        -100 if word is None or word == last else labels[word]
        for last, word in zip(before, word_ids)
    ]


def _some_words(rng: random.Random) -> tuple[list[int | None], list[int]]:
    """Word ids of a truncated example, and its labels.

    Some words have several pieces, padding follows, and there may be more labels than words left.
    """
    words = rng.randint(2, 6)
    ids = [word for word in range(words) for _ in range(rng.randint(1, 3))]
    return [None, *ids, None, *[None] * rng.randint(0, 3)], [
        rng.randint(0, 8) for _ in range(words + rng.randint(0, 2))
    ]

"""Exercises of notebook 20: a language model on one GPU."""

from __future__ import annotations

import random

from exercises.check import exercise
from exercises.comparisons import agree, close
from tight_fit.checks import IGNORE


@exercise(
    "20.1",
    hints=[
        "Each token has one number for each word of the vocabulary; a number in fp32 has 4 bytes.",
        "4 x 2,048 tokens, times 128,256 words, times 4 bytes.",
    ],
    why="And a plain loss holds several tensors of this size at once",
)
def _(answer):
    close(answer, 4 * 2048 * 128_256 * 4, rel=1e-6, unit="bytes")


def _lengths(rng: random.Random) -> tuple:
    return ([rng.randint(1, 9) for _ in range(rng.randint(1, 5))],)


@exercise(
    "20.2",
    hints=[
        "A row with texts of 3 and 2 tokens has the position ids 0, 1, 2, 0, 1.",
        "One loop over the lengths: add list(range(length)) to what you have.",
    ],
    why="From positions that start again transformers knows where a text begins",
)
def _(answer):
    agree(
        answer,
        lambda lengths: [place for length in lengths for place in range(length)],
        examples=[([3, 2],), ([1],), ([1, 1, 4],)],
        draw=_lengths,
    )


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
    "20.3",
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

"""Which rows a smaller split keeps: deterministic from the seed, and nested (100 rows are among the 200)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def balanced_order(labels: Sequence[int], seed: int = 0) -> np.ndarray:
    """All rows, ordered so that every prefix is as class-balanced as the split allows; int64, shape (rows,).

    Rounds of one row a class, each class's rows and each round's classes in random order; a class with no
    rows left sits out. In a prefix two classes differ by at most one row, unless the smaller is used up.
    """
    by_class, random = _shuffled(labels, seed)
    order = []
    for turn in range(max(map(len, by_class), default=0)):
        order += [
            by_class[i][turn] for i in random.permutation(len(by_class)) if turn < len(by_class[i])
        ]
    return np.array(order, dtype=np.int64)


def proportional_order(labels: Sequence[int], seed: int = 0) -> np.ndarray:
    """All rows, ordered so that every prefix nearly keeps the split's class shares; int64, shape (rows,).

    The k-th of a class's n rows stands at (k + 1/2) / n of the way through.
    """
    by_class, random = _shuffled(labels, seed)
    places = [(np.arange(len(rows)) + 0.5) / len(rows) for rows in by_class]
    if not places:
        return np.array([], dtype=np.int64)
    return np.concatenate(by_class)[np.argsort(np.concatenate(places), kind="stable")]


def _shuffled(labels: Sequence[int], seed: int) -> tuple[list[np.ndarray], np.random.RandomState]:
    random = np.random.RandomState(
        seed
    )  # the generator whose numbers NumPy promises never to change
    labels = np.asarray(labels, dtype=np.int64)
    return [
        random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)
    ], random

"""Which examples a smaller split keeps.

The choice follows from the seed alone, and it is nested: the first 100 examples are among the first
200.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tight_fit.checks import shown, whole


def balanced_order(labels: Sequence[int], seed: int = 0) -> np.ndarray:
    """An order in which every prefix is as class-balanced as the split allows.

    It takes one example per class in each round, with the examples of each class and the classes of
    each round in random order; a class that has no example left sits out. In a prefix the sizes of
    two classes differ by at most one, unless all examples of the smaller class are in it. Gives
    indices, int64 (examples,).
    """
    by_class, random = _shuffled_by_class(labels, seed)
    order = []
    for turn in range(max(map(len, by_class), default=0)):
        order += [
            by_class[i][turn] for i in random.permutation(len(by_class)) if turn < len(by_class[i])
        ]
    return np.array(order, dtype=np.int64)


def proportional_order(labels: Sequence[int], seed: int = 0) -> np.ndarray:
    """An order in which every prefix has nearly the class frequencies of the whole split.

    The k-th of the n examples of a class stands at (k + 1/2) / n of the way through. Gives indices,
    int64 (examples,).
    """
    by_class, _ = _shuffled_by_class(labels, seed)
    positions = [(np.arange(len(members)) + 0.5) / len(members) for members in by_class]
    if not positions:
        return np.array([], dtype=np.int64)
    return np.concatenate(by_class)[np.argsort(np.concatenate(positions), kind="stable")]


def _shuffled_by_class(
    labels: Sequence[int], seed: int
) -> tuple[list[np.ndarray], np.random.RandomState]:
    """The indices of each class in random order, and the generator for what is drawn next."""
    whole("seed", seed, 0, 2**32 - 1)
    classes = np.asarray(labels)
    if classes.ndim != 1 or (classes.size and classes.dtype.kind not in "iu"):
        raise TypeError(f"labels={shown(labels)} must be a list of whole numbers.")
    random = np.random.RandomState(seed)  # NumPy promises never to change its numbers
    classes = classes.astype(np.int64)
    by_class = [
        random.permutation(np.flatnonzero(classes == label)) for label in np.unique(classes)
    ]
    return by_class, random

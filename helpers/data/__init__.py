"""Data: four public sets, and the way from their examples to batches of tensors.

Every set is a `DatasetDict` with the same columns, whatever it was read from. Text sets have the
columns `text` (str) and `label` (ClassLabel), image sets `image` (PIL, RGB) and `label`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from datasets import Dataset, DatasetDict

from helpers.data.encoding import Encoded, Pixels, batches_of, check_words, encode
from helpers.data.images import cifar10, digits
from helpers.data.subset import balanced_order, proportional_order
from helpers.data.text import newsgroups, r8
from tight_fit.checks import MOST_SEED, shown, whole

__all__ = [
    "SETS",
    "Encoded",
    "Pixels",
    "balanced_order",
    "batches_of",
    "check_words",
    "encode",
    "load",
    "proportional_order",
    "source",
]

SETS = {"r8": r8, "newsgroups": newsgroups, "digits": digits, "cifar10": cifar10}


def load(
    name: str, train_size: int | None = None, seed: int = 0, test_size: int | None = None
) -> DatasetDict:
    """A data set with the splits "train" and "test".

    name        a key of SETS
    train_size  examples of the training split to keep, as class-balanced as the split allows; None
                keeps all of them, in the order of the set
    test_size   examples of the test split to keep, with the class frequencies of the split; None
                keeps all of them
    seed        decides which examples are kept, and their order. The examples kept for a smaller
                size are among those kept for a larger one.

    Raises ValueError for an unknown name and for a size that the split does not have, TypeError for
    a size that is no whole number. Raises FileNotFoundError or hub.HubUnavailable (both OSError),
    with what to do, when the set cannot be found.
    """
    if not isinstance(name, str) or name not in SETS:
        raise ValueError(f"There is no data set {shown(name)}: choose one of {', '.join(SETS)}.")
    for field, size in (("train_size", train_size), ("test_size", test_size)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer))):
            raise TypeError(
                f"{field}={shown(size)} must be a whole number of examples, or None "
                "for all of them."
            )
    whole("seed", seed, 0, MOST_SEED)
    full = SETS[name]()
    return DatasetDict(
        train=_take(full["train"], "train_size", train_size, balanced_order, seed),
        test=_take(full["test"], "test_size", test_size, proportional_order, seed),
    )


def source(split: Dataset) -> str:
    """What a split was read from, in one line, to stand beside accuracies and in records."""
    return split.info.description


def _take(
    split: Dataset,
    field: str,
    size: int | None,
    order: Callable[[Sequence[int], int], np.ndarray],
    seed: int,
) -> Dataset:
    """The first `size` examples of the split in this order."""
    if size is None:
        return split
    if not 1 <= size <= len(split):
        raise ValueError(
            f"{field}={shown(size)} is not possible: choose 1 to {len(split)} examples, or "
            "None for all."
        )
    return split.select(order(split["label"][:], seed)[:size])

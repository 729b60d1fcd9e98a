"""Data: four public sets, each a `DatasetDict` with the same columns whatever it was read from.

Text sets have the columns `text` (str) and `label` (ClassLabel), image sets `image` (PIL, RGB) and `label`.
"""

from __future__ import annotations

import numpy as np
from datasets import Dataset, DatasetDict

from helpers.data.encoding import Encoded, Pixels, encode
from helpers.data.images import cifar10, digits
from helpers.data.subset import balanced_order, proportional_order
from helpers.data.text import newsgroups, r8

__all__ = [
    "SETS",
    "load",
    "source",
    "encode",
    "Encoded",
    "Pixels",
    "balanced_order",
    "proportional_order",
]

SETS = {"r8": r8, "newsgroups": newsgroups, "digits": digits, "cifar10": cifar10}


def load(
    name: str, train_size: int | None = None, seed: int = 0, test_size: int | None = None
) -> DatasetDict:
    """A data set with splits "train" and "test".

    train_size  rows of the training split to keep, as class-balanced as it allows (None: all, in the set's
                own order)
    test_size   rows of the test split to keep, in the split's class shares (None: all)
    seed        decides which rows, and their order; the rows kept for a smaller size are among those for a
                larger one

    Raises ValueError for an unknown name or a size that the split does not have, TypeError for a size that is
    no whole number, FileNotFoundError or hub.HubUnavailable (both OSError) when the set cannot be had, with
    what to do.
    """
    if name not in SETS:
        raise ValueError(f"There is no data set {name!r}: choose one of {', '.join(SETS)}.")
    for field, size in (("train_size", train_size), ("test_size", test_size)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer))):
            raise TypeError(
                f"{field}={size!r} must be a whole number of rows, or None for all of them."
            )
    whole = SETS[name]()
    return DatasetDict(
        train=_take(whole["train"], "train_size", train_size, balanced_order, seed),
        test=_take(whole["test"], "test_size", test_size, proportional_order, seed),
    )


def source(split: Dataset) -> str:
    """What a split was read from, in one line: for records, and beside accuracies."""
    return split.info.description


def _take(split: Dataset, field: str, size: int | None, order, seed: int) -> Dataset:
    if size is None:
        return split
    if not 1 <= size <= len(split):
        raise ValueError(
            f"{field}={size} is not possible: choose 1 to {len(split)} rows, or None for all."
        )
    return split.select(order(split["label"][:], seed)[:size])

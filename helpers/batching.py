"""Which examples go into which batch; what their padding costs is counted by `by_hand.padding`.

A length is the number of tokens of one example, special tokens included. An order is a function of
its arguments alone: it is the same on every machine, and batch k of an epoch can be made without
reading the batches before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from helpers.recipe import Recipe
from tight_fit.checks import MOST_SEED, shown, whole

Batch = list[int]  # indices of examples
Group = list[Batch]  # the micro-batches of one optimizer step
# Batches that padding="uniform" sorts together: a larger window pads less and mixes less.
WINDOW = 32


def epoch_order(examples: int, seed: int, epoch: int) -> list[int]:
    """A random permutation of range(examples).

    Raises ValueError or TypeError for no examples and for a negative seed or epoch.
    """
    return permutation(whole("examples", examples, 1), generator(seed, epoch))


def shuffled(
    examples: int, batch_size: int, micro_batch: int, seed: int, epoch: int
) -> list[Group]:
    """The optimizer steps of one epoch, with the examples in random order.

    The last step holds the examples % batch_size that remain, if any. Raises ValueError or
    TypeError for numbers from which no batches can be made.
    """
    _check_sizes(batch_size, micro_batch)
    order = epoch_order(examples, seed, epoch)
    return [cut(group, micro_batch) for group in cut(order, batch_size)]


def bucketed(
    lengths: Sequence[int], batch_size: int, micro_batch: int, window: int, seed: int, epoch: int
) -> list[Group]:
    """The optimizer steps of one epoch, with examples of similar length in each micro-batch.

    The permutation of `epoch_order` is cut into windows of `window` * batch_size examples. Each
    window is sorted by length and cut into micro-batches, and then the micro-batches of all windows
    are shuffled. A step with gradient accumulation therefore still mixes short and long examples. A
    larger window needs less padding and mixes less. The examples % batch_size that remain are a
    random subset, and always the last step.
    Source: Khomenko et al. 2016, https://arxiv.org/abs/1708.05604.

    Raises ValueError or TypeError for numbers from which no batches can be made, and for a length
    below 1.
    """
    lengths = checked_lengths(lengths)
    _check_sizes(batch_size, micro_batch)
    rng = generator(seed, epoch)
    order = permutation(len(lengths), rng)
    full = len(order) - len(order) % batch_size
    micro_batches = []
    for examples in cut(order[:full], whole("window", window, 1) * batch_size):
        micro_batches += cut(sorted(examples, key=lengths.__getitem__), micro_batch)
    mixed = [micro_batches[index] for index in permutation(len(micro_batches), rng)]
    rest = cut(sorted(order[full:], key=lengths.__getitem__), micro_batch)
    return cut(mixed, batch_size // micro_batch) + ([rest] if rest else [])


def length_sorted(lengths: Sequence[int], batch_size: int) -> list[Batch]:
    """Batches for inference, with the longest examples first.

    A batch that does not fit into memory is then the first one. Raises ValueError or TypeError for
    a batch_size or a length below 1.
    """
    lengths = checked_lengths(lengths)
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return cut(order, whole("batch_size", batch_size, 1))


def padded_length(longest: int, multiple_of: int = 8, max_length: int | None = None) -> int:
    """The padded length of a batch, in tokens: the length of its longest example, rounded up.

    Tensor cores like multiples of 8. The result is never above max_length, unless the longest
    example itself is. Raises ValueError or TypeError for numbers below 1 and what is no whole
    number.
    """
    whole("longest", longest, 1)
    whole("multiple_of", multiple_of, 1)
    if max_length is not None:
        whole("max_length", max_length, 1)
    rounded = -(-longest // multiple_of) * multiple_of
    return rounded if max_length is None else max(longest, min(rounded, max_length))


def generator(seed: int, epoch: int) -> torch.Generator:
    """The random number generator of one epoch.

    Raises ValueError or TypeError for a seed or an epoch that is no whole number from 0 on.
    """
    # Of a seed above it torch's CPU generator would drop some bits.
    number = whole("seed", seed, 0, MOST_SEED) * 1_000_003 + whole("epoch", epoch, 0)
    return torch.Generator().manual_seed(number)


def permutation(size: int, generator: torch.Generator) -> list[int]:
    """A random permutation of range(size), drawn from the generator."""
    return torch.randperm(size, generator=generator).tolist()


def cut(items: Sequence, size: int) -> list[list]:
    """Slices of `size` items; the last one is smaller where `size` does not divide their number."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def checked_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """The lengths, in tokens, as a list of ints.

    Raises ValueError for no examples or a length below 1, TypeError for a length that is no whole
    number.
    """
    ordered = isinstance(lengths, Sequence | Tensor | np.ndarray)  # a set holds equal lengths once
    ordered = ordered and not isinstance(lengths, bytearray)
    values = np.asarray(lengths if ordered else None)
    if ordered and not values.size:
        raise ValueError("There are no examples to make batches of.")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TypeError(f"lengths={shown(lengths)} must be a list of whole numbers of tokens.")
    if values.min() < 1:
        example = int((values < 1).argmax())
        raise ValueError(
            f"Example {example} has length {values[example]}: an empty document cannot be batched, "
            "drop it."
        )
    return values.tolist()


def _check_sizes(batch_size: int, micro_batch: int) -> None:
    if whole("batch_size", batch_size, 1) % whole("micro_batch", micro_batch, 1):
        raise ValueError(
            f"micro_batch={micro_batch} does not divide batch_size={batch_size}: micro-batches "
            "must be equal."
        )


def rows_of_step(
    recipe: Recipe, rows: int, step: int, lengths: Sequence[int] | None = None
) -> list[list[int]]:
    """The indices of the examples in each micro-batch of optimizer step `step` (from 0).

    Depends on its arguments alone. Every epoch is a new permutation of all `rows` examples; its
    last step is smaller when the batch size does not divide their number. padding="uniform" orders
    them by `bucketed` instead, for which it needs their `lengths` in tokens (ValueError
    without).
    """
    epoch, step_of_epoch = divmod(step, math.ceil(rows / recipe.batch_size))
    sizes = recipe.batch_size, recipe.micro_batch
    if recipe.padding != "uniform":
        return _shuffled(rows, *sizes, recipe.seed, epoch)[step_of_epoch]
    if lengths is None:
        raise ValueError(
            "padding='uniform' puts examples of similar length together: give their lengths."
        )
    return _bucketed(tuple(lengths), *sizes, WINDOW, recipe.seed, epoch)[step_of_epoch]


_shuffled = lru_cache(maxsize=4)(shuffled)
_bucketed = lru_cache(maxsize=4)(bucketed)

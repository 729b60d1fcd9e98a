"""Which rows go into which batch, and what that costs.

Lengths are tokens a row, special tokens included. An order is a function of its arguments alone: the same on every
machine, and batch k of an epoch can be had without the batches before it having been read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Batch = list[int]
Group = list[Batch]  # the micro-batches of one optimizer step


def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """A random permutation of range(rows). Raises ValueError or TypeError for a negative seed, epoch or no rows."""
    return permutation(whole("rows", rows), generator(seed, epoch))


def shuffled(rows: int, batch_size: int, micro_batch: int, seed: int, epoch: int) -> list[Group]:
    """The optimizer steps of an epoch, rows in random order; the last step has the rows % batch_size that remain.

    Raises ValueError or TypeError for numbers that make no batches.
    """
    _check_sizes(batch_size, micro_batch)
    return [cut(group, micro_batch) for group in cut(epoch_order(rows, seed, epoch), batch_size)]


def bucketed(
    lengths: Sequence[int], batch_size: int, micro_batch: int, window: int, seed: int, epoch: int
) -> list[Group]:
    """The optimizer steps of an epoch, each micro-batch of rows of like length.

    The permutation of `epoch_order` is cut into windows of `window` * batch_size rows, each window is sorted by length
    and cut into micro-batches, and the micro-batches of all windows are shuffled. So a step mixes lengths as far as
    gradient accumulation lets it, and a wider window pads less and mixes less. The rows % batch_size that remain, a
    random subset, are always the last step. After Khomenko et al. 2016, https://arxiv.org/abs/1708.05604.
    Raises ValueError or TypeError for numbers that make no batches and for a length below 1.
    """
    lengths = checked_lengths(lengths)
    _check_sizes(batch_size, micro_batch)
    rng = generator(seed, epoch)
    order = permutation(len(lengths), rng)
    full = len(order) - len(order) % batch_size
    parts = []
    for rows in cut(order[:full], whole("window", window) * batch_size):
        parts += cut(sorted(rows, key=lengths.__getitem__), micro_batch)
    mixed = [parts[place] for place in permutation(len(parts), rng)]
    rest = cut(sorted(order[full:], key=lengths.__getitem__), micro_batch)
    return cut(mixed, batch_size // micro_batch) + ([rest] if rest else [])


def length_sorted(lengths: Sequence[int], batch_size: int) -> list[Batch]:
    """Batches for inference, the longest rows first, so that a batch that does not fit shows at once.

    Raises ValueError or TypeError for a batch_size or a length below 1.
    """
    lengths = checked_lengths(lengths)
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return cut(order, whole("batch_size", batch_size))


def restore(values: Tensor | Sequence, batches: Sequence[Batch]) -> Tensor | list:
    """Results in the order of the rows again.

    values  a tensor (rows, ...) or a sequence, one result a row, in the order in which `batches` name the rows
    Raises ValueError when the batches do not name every row from 0 once, or hold another number than there are values.
    """
    order = [row for batch in batches for row in batch]
    if sorted(order) != list(range(len(order))):
        raise ValueError(
            "The batches do not name every row exactly once: the order cannot be restored."
        )
    if len(values) != len(order):
        raise ValueError(
            f"{len(values)} results for {len(order)} rows: give one result a row, batches joined."
        )
    place = sorted(range(len(order)), key=order.__getitem__)
    return (
        values[torch.tensor(place, dtype=torch.int64)]
        if isinstance(values, Tensor)
        else [values[i] for i in place]
    )


def padded_length(longest: int, multiple_of: int = 8, max_length: int | None = None) -> int:
    """Tokens a row of a batch: the longest row's, rounded up for tensor cores, but never above max_length."""
    width = -(-longest // multiple_of) * multiple_of
    return width if max_length is None else max(longest, min(width, max_length))


class Cost(NamedTuple):
    """What an epoch's batches hold.

    real     tokens of the documents
    padding  tokens that are not
    pairs    entries of the attention scores, one head of one layer: rows * padded length squared, summed
    """

    real: int
    padding: int
    pairs: int


def epoch_cost(
    batches: Sequence[Batch],
    lengths: Sequence[int],
    multiple_of: int = 8,
    length: int | None = None,
    max_length: int | None = None,
) -> Cost:
    """Tokens and attention pairs of (micro-)batches: each padded as `pad` does with the same arguments.

    Raises ValueError for an empty batch, a length below 1, or a document longer than `length` or `max_length`.
    """
    lengths = checked_lengths(lengths)
    real = total = pairs = 0
    for batch in batches:
        if not batch:
            raise ValueError("A batch holds no rows: leave it out.")
        width = batch_width([lengths[row] for row in batch], multiple_of, length, max_length)
        real += sum(lengths[row] for row in batch)
        total += len(batch) * width
        pairs += len(batch) * width**2
    return Cost(real, total - real, pairs)


def padded_share(
    batches: Sequence[Batch],
    lengths: Sequence[int],
    multiple_of: int = 8,
    length: int | None = None,
    max_length: int | None = None,
) -> float:
    """Share of the batches' tokens that is padding, from 0 to below 1. Raises as `epoch_cost`, and for no batches."""
    if not batches:
        raise ValueError("There are no batches to take a share of.")
    cost = epoch_cost(batches, lengths, multiple_of, length, max_length)
    return cost.padding / (cost.real + cost.padding)


def batch_width(
    lengths: Sequence[int], multiple_of: int, length: int | None, max_length: int | None
) -> int:
    """Tokens a row of a batch of documents of these lengths. Raises ValueError for one that is too long."""
    limit = max_length if length is None else whole("length", length)
    longest = max(lengths)
    if limit is not None and longest > limit:
        raise ValueError(
            f"Row {lengths.index(longest)} of the batch has {longest} tokens, more than {limit}: truncate "
            "it, or allow more."
        )
    return (
        padded_length(longest, whole("multiple_of", multiple_of), max_length)
        if length is None
        else length
    )


def generator(seed: int, epoch: int) -> torch.Generator:
    """The random numbers of one epoch. Raises ValueError or TypeError for a seed or an epoch that is no such number."""
    return torch.Generator().manual_seed(seed_in_range(seed) * 1_000_003 + whole("epoch", epoch, 0))


def permutation(rows: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(rows, generator=generator).tolist()


def cut(rows: Sequence, size: int) -> list[list]:
    """Slices of `size`, the last one smaller where it does not divide."""
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def seed_in_range(seed: int) -> int:
    """Raises ValueError for a seed of which torch's generator on the CPU would not use every bit."""
    if whole("seed", seed, 0) >= 2**32:
        raise ValueError(
            f"seed={seed} must be below 2**32: torch's generator uses no more bits of it."
        )
    return int(seed)


def whole(name: str, value, least: int = 1) -> int:
    """The value as an int. Raises TypeError for no whole number, ValueError for one below `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    if operator.index(value) < least:
        raise ValueError(f"{name}={value} must be at least {least}.")
    return operator.index(value)


def checked_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """Tokens a row, as ints. Raises ValueError for no rows or a length below 1, TypeError for no whole number."""
    values = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if not values:
        raise ValueError("There are no rows to make batches of.")
    for row, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"Row {row} has length {value!r}: lengths are whole numbers of tokens.")
        if value < 1:
            raise ValueError(
                f"Row {row} has length {value}: an empty document cannot be batched, drop it."
            )
    return [operator.index(value) for value in values]


def _check_sizes(batch_size: int, micro_batch: int) -> None:
    if whole("batch_size", batch_size) % whole("micro_batch", micro_batch):
        raise ValueError(
            f"micro_batch={micro_batch} does not divide batch_size={batch_size}: micro-batches must be "
            "equal."
        )

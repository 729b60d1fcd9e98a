"""What padding costs: real tokens, padding and attention pairs of batches of documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from helpers.batching import Batch, checked_lengths, padded_length
from tight_fit.checks import shown, whole


def restore(values: Tensor | Sequence, batches: Sequence[Batch]) -> Tensor | list:
    """Puts results back into the order of the examples.

    values  one result per example, in the order in which `batches` name the examples: a tensor
            (examples, ...), or a sequence, which comes back as a list

    Raises ValueError when the batches do not name every example from 0 on exactly once, and when
    the number of values is not the number of examples.
    """
    if not isinstance(values, (Tensor, Sequence)):
        raise TypeError(f"values={shown(values)} must be a tensor or a list, of one per example.")
    order = _examples(batches)
    if sorted(order) != list(range(len(order))):
        raise ValueError(
            "The batches do not name every example exactly once: the order cannot be restored."
        )
    if len(values) != len(order):
        raise ValueError(
            f"{len(values)} results for {len(order)} examples: give one result per example, "
            "batches joined."
        )
    positions = sorted(range(len(order)), key=order.__getitem__)
    if isinstance(values, Tensor):
        return values[torch.tensor(positions, dtype=torch.int64)]
    return [values[position] for position in positions]


def _examples(batches: Sequence[Batch]) -> list[int]:
    """The examples of all batches, in their order. Raises TypeError for what are no batches."""
    lists = isinstance(batches, Sequence) and all(isinstance(one, Sequence) for one in batches)
    order = [example for batch in batches for example in batch] if lists else []
    if not lists or not all(isinstance(example, int) for example in order):
        raise TypeError(f"batches={shown(batches)} must be a list of lists of examples.")
    return order


class Cost(NamedTuple):
    """What the batches of an epoch hold.

    real     tokens of the documents
    padding  tokens that are padding
    pairs    attention scores of one head of one layer: examples * padded length squared, summed
             over the batches
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
    """Tokens and attention pairs of (micro-)batches, each padded by `by_hand.collate.pad`.

    The last three arguments are those of `pad`. Raises ValueError for an empty batch, for a length
    below 1, and for a document that is longer than `length` or `max_length`.
    """
    lengths = checked_lengths(lengths)
    order = _examples(batches)
    if not all(-1 < example < len(lengths) for example in order):
        raise ValueError(f"A batch names an example that is not among the {len(lengths)} lengths.")
    real = total = pairs = 0
    for batch in batches:
        if not batch:
            raise ValueError("A batch holds no examples: leave it out.")
        tokens = [lengths[example] for example in batch]
        padded = batch_length(tokens, multiple_of, length, max_length)
        real += sum(tokens)
        total += len(batch) * padded
        pairs += len(batch) * padded**2
    return Cost(real, total - real, pairs)


def padded_share(
    batches: Sequence[Batch],
    lengths: Sequence[int],
    multiple_of: int = 8,
    length: int | None = None,
    max_length: int | None = None,
) -> float:
    """The fraction of the batches' tokens that is padding, from 0 to below 1.

    Raises ValueError as `epoch_cost` does, and where there are no batches.
    """
    if not batches:
        raise ValueError("There are no batches: the share of their padding is not defined.")
    cost = epoch_cost(batches, lengths, multiple_of, length, max_length)
    return cost.padding / (cost.real + cost.padding)


def batch_length(
    lengths: Sequence[int], multiple_of: int, length: int | None, max_length: int | None
) -> int:
    """The padded length, in tokens, of a batch of documents with these lengths.

    It is `length` where that is given, and `padded_length` of the longest document otherwise.
    Raises ValueError for a document that is too long.
    """
    limit = max_length if length is None else whole("length", length, 1)
    longest = max(lengths)
    if limit is not None and longest > limit:
        raise ValueError(
            f"Example {lengths.index(longest)} of the batch has {longest} tokens, more than "
            f"{limit}: truncate it, or allow more."
        )
    if length is not None:
        return length
    return padded_length(longest, whole("multiple_of", multiple_of, 1), max_length)

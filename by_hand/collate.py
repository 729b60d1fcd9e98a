"""From documents of unequal lengths to one batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from by_hand.padding import batch_length
from tight_fit.checks import IGNORE, one_of


def pad(
    examples: Sequence[Mapping | Sequence[int] | Tensor],
    pad_id: int,
    multiple_of: int = 8,
    length: int | None = None,
    side: str = "right",
    max_length: int | None = None,
    classes: int | None = None,
    truncate: bool = False,
) -> dict[str, Tensor]:
    """Documents of unequal lengths as one batch of int64 tensors.

    It gives input_ids and attention_mask (examples, tokens), and labels if the examples have any:
    (examples,) for one class per example, (examples, tokens) for one class per token, where the
    label of padding is IGNORE.

    examples    token ids, or mappings with "input_ids" and optionally "attention_mask" and "labels"
                (or "label"). Tokens that an attention_mask hides are removed first, so that
                examples may be padded already.
    pad_id      the token id of padding
    multiple_of, max_length
                where `length` is None, the padded length is that of the longest example, rounded up
                to `multiple_of`, but never above `max_length`, the most that the model can take
    length      the padded length in tokens, or None
    side        where the padding goes: "right" or "left"
    classes     labels must lie in 0 ... classes - 1; None asks only that they are not negative
    truncate    cut documents that are too long to their first tokens instead of refusing them. A
                closing [SEP] is cut off as well: where the model needs one, let the tokenizer
                truncate

    Raises ValueError, in one sentence, for no examples, an empty document, one that is too long, a
    label outside the range, labels that only some examples have or that are not one per token, and
    columns that cannot be padded. Raises TypeError for ids or labels that are not whole numbers.
    """
    if not len(examples):
        raise ValueError("There are no examples to pad.")
    one_of("side", side, ("right", "left"))
    limit = max_length if length is None else length
    documents = [
        _document(index, example, classes, limit if truncate else None)
        for index, example in enumerate(examples)
    ]
    ids = [document[0] for document in documents]
    labels = [document[1] for document in documents if document[1] is not None]
    dimensions = {row.dim() for row in labels}
    if len(dimensions) > 1 or len(labels) not in (0, len(ids)):
        raise ValueError(
            "Some examples have no labels, or labels of another kind: give every example one "
            "class, or every token one class, or no example any."
        )
    padded = batch_length([len(row) for row in ids], multiple_of, length, max_length)
    batch = {
        "input_ids": _stack(ids, padded, pad_id, side),
        "attention_mask": _stack([torch.ones_like(row) for row in ids], padded, 0, side),
    }
    if labels:
        per_example = dimensions == {0}
        batch["labels"] = (
            torch.stack(labels) if per_example else _stack(labels, padded, IGNORE, side)
        )
    return batch


@dataclass(frozen=True)
class Collator:
    """`pad` with its arguments set: a DataLoader's collate_fn that can be sent to its workers."""

    pad_id: int
    multiple_of: int = 8
    length: int | None = None
    side: str = "right"
    max_length: int | None = None
    classes: int | None = None
    truncate: bool = False

    def __call__(self, examples: Sequence) -> dict[str, Tensor]:
        return pad(examples, **vars(self))


def _document(
    index: int, example, classes: int | None, limit: int | None
) -> tuple[Tensor, Tensor | None]:
    """An example's token ids (tokens,) and its labels, () or (tokens,), checked, cut to `limit`."""
    columns = example if isinstance(example, Mapping) else {"input_ids": example}
    unknown = sorted(set(columns) - {"input_ids", "attention_mask", "labels", "label"})
    if unknown or "input_ids" not in columns:
        raise ValueError(
            f"Example {index} has columns {', '.join(map(str, columns))}: keep input_ids, and if "
            "need be attention_mask and labels."
        )
    ids = _int64(index, "input_ids", columns["input_ids"])
    labels = columns.get("labels", columns.get("label"))
    labels = None if labels is None else _int64(index, "labels", labels)
    if ids.dim() != 1 or labels is not None and labels.dim() > 0 and labels.shape != ids.shape:
        raise ValueError(
            f"Example {index} must hold one list of token ids and one label, or one label per "
            "token."
        )
    if labels is not None:
        _check_labels(index, labels, classes)
    if "attention_mask" in columns:
        real = _int64(index, "attention_mask", columns["attention_mask"]).bool()
        if real.shape != ids.shape:
            raise ValueError(
                f"Example {index} has {len(ids)} tokens and an attention_mask of {real.numel()}."
            )
        ids = ids[real]
        labels = labels[real] if labels is not None and labels.dim() else labels
    if not len(ids):
        raise ValueError(f"Example {index} is an empty document: drop it.")
    return ids[:limit], labels[:limit] if labels is not None and labels.dim() else labels


def _check_labels(index: int, labels: Tensor, classes: int | None) -> None:
    counted = labels[labels != IGNORE] if labels.dim() else labels[None]
    wrong = counted[(counted < 0) | (counted >= (classes or torch.inf))]
    if len(wrong):
        allowed = "are not negative" if classes is None else f"go from 0 to {classes - 1}"
        raise ValueError(f"Example {index} has label {int(wrong[0])}: labels {allowed}.")


def _int64(index: int, name: str, values) -> Tensor:
    values = torch.as_tensor(values)
    if values.numel() and (values.is_floating_point() or values.is_complex()):
        raise TypeError(
            f"Example {index} has {name} of {values.dtype}: they must be whole numbers."
        )
    return values.to(torch.int64)


def _stack(rows: list[Tensor], length: int, value: int, side: str) -> Tensor:
    """int64 (rows, length), with `value` beside each row's own values."""
    out = torch.full((len(rows), length), value, dtype=torch.int64)
    for index, row in enumerate(rows):
        own = slice(len(row)) if side == "right" else slice(length - len(row), length)
        out[index, own] = row
    return out

"""From documents of unequal lengths to one batch of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helpers.data.batching import batch_width

IGNORE = -100  # a token-level label that no loss counts: torch's cross_entropy skips it


def pad(
    rows: Sequence[Mapping | Sequence[int] | Tensor],
    pad_id: int,
    multiple_of: int = 8,
    length: int | None = None,
    side: str = "right",
    max_length: int | None = None,
    classes: int | None = None,
    truncate: bool = False,
) -> dict[str, Tensor]:
    """Documents of unequal lengths as one batch, all int64: input_ids and attention_mask (rows, tokens), and labels.

    rows        token ids; or {"input_ids"} with, if need be, "attention_mask" (tokens that it masks are taken out
                first, so rows that are padded already will do) and "labels" or "label": a class a row gives labels
                (rows,), a class a token gives (rows, tokens), where padding is IGNORE
    length      tokens a row of the batch; None takes the longest row's, rounded up to `multiple_of`
    max_length  what the model can take, where `length` is None: nothing is padded beyond it
    side        where the padding goes: "right" or "left"
    classes     labels must lie in 0 ... classes - 1; None asks only that they are not negative
    truncate    documents that are too long keep their first tokens; else they are refused. It cuts off a closing [SEP]:
                where the model wants one, let the tokenizer truncate

    Raises ValueError, in one sentence, for no rows, an empty document, one that is too long, a label outside the range,
    labels in some rows only or not one a token, columns that it cannot pad; TypeError for ids that are not whole.
    """
    if not len(rows):
        raise ValueError("There are no rows to pad.")
    if side not in ("right", "left"):
        raise ValueError(f"side={side!r} is not known: use 'right' or 'left'.")
    limit = max_length if length is None else length
    documents = [
        _document(place, row, classes, limit if truncate else None)
        for place, row in enumerate(rows)
    ]
    kinds = {None if labels is None else labels.dim() for _, labels in documents}
    if len(kinds) > 1:
        raise ValueError(
            "Some rows have no labels, or labels of another kind: give all rows a class, or all a class a "
            "token, or none any."
        )
    width = batch_width([len(ids) for ids, _ in documents], multiple_of, length, max_length)
    ids = [ids for ids, _ in documents]
    batch = {
        "input_ids": _stack(ids, width, pad_id, side),
        "attention_mask": _stack([torch.ones_like(row) for row in ids], width, 0, side),
    }
    if kinds != {None}:
        labels = [labels for _, labels in documents]
        batch["labels"] = (
            torch.stack(labels) if kinds == {0} else _stack(labels, width, IGNORE, side)
        )
    return batch


@dataclass(frozen=True)
class Collator:
    """`pad` with its arguments set: a DataLoader's collate_fn, which workers can be sent."""

    pad_id: int
    multiple_of: int = 8
    length: int | None = None
    side: str = "right"
    max_length: int | None = None
    classes: int | None = None
    truncate: bool = False

    def __call__(self, rows: Sequence) -> dict[str, Tensor]:
        return pad(rows, **vars(self))


def _document(
    place: int, row, classes: int | None, limit: int | None
) -> tuple[Tensor, Tensor | None]:
    """A row's token ids (tokens,) and its labels, () or (tokens,), checked and cut to `limit`."""
    row = row if isinstance(row, Mapping) else {"input_ids": row}
    unknown = sorted(set(row) - {"input_ids", "attention_mask", "labels", "label"})
    if unknown or "input_ids" not in row:
        raise ValueError(
            f"Row {place} has columns {', '.join(map(str, row))}: keep input_ids, and if need be "
            "attention_mask and labels."
        )
    ids = _int64(place, "input_ids", row["input_ids"])
    labels = row.get("labels", row.get("label"))
    labels = None if labels is None else _int64(place, "labels", labels)
    if ids.dim() != 1 or labels is not None and labels.dim() > 0 and labels.shape != ids.shape:
        raise ValueError(
            f"Row {place} must hold one list of token ids and one label, or one label a token."
        )
    if labels is not None:
        counted = labels[labels != IGNORE] if labels.dim() else labels[None]
        wrong = counted[(counted < 0) | (counted >= (classes or torch.inf))]
        if len(wrong):
            allowed = "are not negative" if classes is None else f"go from 0 to {classes - 1}"
            raise ValueError(f"Row {place} has label {int(wrong[0])}: labels {allowed}.")
    if "attention_mask" in row:
        real = _int64(place, "attention_mask", row["attention_mask"]).bool()
        if real.shape != ids.shape:
            raise ValueError(
                f"Row {place} has {len(ids)} tokens and an attention_mask of {real.numel()}."
            )
        ids = ids[real]
        labels = labels[real] if labels is not None and labels.dim() else labels
    if not len(ids):
        raise ValueError(f"Row {place} is an empty document: drop it.")
    return ids[:limit], labels[:limit] if labels is not None and labels.dim() else labels


def _int64(place: int, name: str, values) -> Tensor:
    values = torch.as_tensor(values)
    if values.numel() and (values.is_floating_point() or values.is_complex()):
        raise TypeError(f"Row {place} has {name} of {values.dtype}: they must be whole numbers.")
    return values.to(torch.int64)


def _stack(rows: list[Tensor], width: int, value: int, side: str) -> Tensor:
    out = torch.full((len(rows), width), value, dtype=torch.int64)
    for place, row in enumerate(rows):
        out[place, slice(len(row)) if side == "right" else slice(width - len(row), width)] = row
    return out

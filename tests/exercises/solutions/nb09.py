"""Answers to the exercises of notebook 09, right and wrong."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from tests.exercises import mistakes

TOTAL, REAL = 4 * 256 + 4 * 96, 12 + 40 + 33 + 250 + 61 + 18 + 90 + 25


def batch(rows, pad_id, multiple=8, label=-100, by_length=True, width=None, mask_of=torch.int64):
    width = width or -(-max(len(row["input_ids"]) for row in rows) // multiple) * multiple
    ids = torch.full((len(rows), width), pad_id)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, label)
    for place, row in enumerate(rows):
        count = len(row["input_ids"])
        ids[place, :count] = torch.tensor(row["input_ids"])
        labels[place, :count] = torch.tensor(row["labels"])
        mask[place, :count] = 1
    return {
        "input_ids": ids,
        "attention_mask": (mask if by_length else ids != pad_id).to(mask_of),
        "labels": labels,
    }


def changes_rows(rows, pad_id):
    found = batch(rows, pad_id)
    for row in rows:
        row["labels"].append(-100)
    return found


def on_the_left(rows, pad_id):
    turned = [{key: value[::-1] for key, value in row.items()} for row in rows]
    return {name: values.flip(1) for name, values in batch(turned, pad_id).items()}


def without_labels(rows, pad_id):
    return {name: values for name, values in batch(rows, pad_id).items() if name != "labels"}


def token_loss(logits, labels, mask, wrong=""):
    """`wrong` is the mistake that it makes."""
    left_out = labels == -1 if wrong == "by label" else mask == 0
    if wrong == "changes labels":
        labels[left_out] = -100
    labels = labels.masked_fill(left_out, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def only_the_divisor(logits, labels, mask):
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def largest(p, share):
    rows = 0
    while 1 - (1 - p) ** (rows + 1) <= share:
        rows += 1
    return rows


RIGHT = {"09.1": (TOTAL - REAL) / TOTAL, "09.2": batch, "09.4": token_loss, "09.3": largest}
WRONG = {
    "09.1": [
        REAL / TOTAL, 1 - REAL / (8 * 256), 1 - REAL / (4 * 250 + 4 * 90), TOTAL - REAL, "62 %",
        0.5,
    ],
    "09.2": [
        partial(batch, multiple=1), partial(batch, label=0), partial(batch, by_length=False),
        partial(batch, width=40), lambda rows, pad_id: batch(rows, 0),
        partial(batch, mask_of=torch.bool), changes_rows, on_the_left, without_labels,
        lambda rows, pad_id: batch(rows, pad_id)["input_ids"], 3,
    ],
    "09.4": [
        only_the_divisor, *mistakes(token_loss, "by label", "changes labels"),
        lambda *given: token_loss(*given).item(), 3,
    ],
    "09.3": [
        lambda p, share: math.ceil(math.log(1 - share) / math.log(1 - p)),
        lambda p, share: math.floor(share / p), lambda p, share: 5,
        lambda p, share: max(1, largest(p, share)), lambda p, share: largest(p, share) + 1,
        lambda p, share: largest(p, 1 - share), 5,
    ],
}  # fmt: skip

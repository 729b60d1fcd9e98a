"""Answers to the exercises of notebook 20, right and wrong."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def next_token_loss(head, hidden, labels, chunk):
    def part(states, wanted):
        return F.cross_entropy(head(states), wanted, reduction="sum")

    pairs = zip(hidden[:-1].split(chunk), labels[1:].split(chunk))
    total = sum(checkpoint(part, *pair, use_reentrant=False) for pair in pairs)
    return total / (labels[1:] != -100).sum()


def keeps_the_logits(head, hidden, labels, chunk):
    pairs = zip(hidden[:-1].split(chunk), labels[1:].split(chunk))
    total = sum(F.cross_entropy(head(a), b, reduction="sum") for a, b in pairs)
    return total / (labels[1:] != -100).sum()


def all_at_once(head, hidden, labels, chunk):
    return F.cross_entropy(head(hidden[:-1]), labels[1:])


def divides_by_all(head, hidden, labels, chunk):
    mean = next_token_loss(head, hidden, labels, chunk)
    return mean * (labels[1:] != -100).sum() / (len(labels) - 1)


def at_random(x, step):
    return (x / step + torch.rand_like(x)).floor() * step


RIGHT = {"20.1": 4 * 2048 * 128_256 * 4, "20.2": next_token_loss, "20.3": at_random}
WRONG = {
    "20.1": [4 * 2048 * 128_256, 4 * 2048 * 128_256 * 2, 2048 * 128_256 * 4, 3.9, "4 GB"],
    "20.2": [
        keeps_the_logits, all_at_once, divides_by_all,
        lambda head, hidden, labels, chunk: next_token_loss(
            head, torch.cat([hidden, hidden[-1:]]), torch.cat([labels[:1], labels]), chunk
        ),  # not moved by one
        3,
    ],
    "20.3": [
        lambda x, step: (x / step).round() * step,
        lambda x, step: ((x / step).floor() + torch.randint_like(x, 2)) * step,
        lambda x, step: x + step * (torch.rand_like(x) - 0.5), lambda x, step: x, 3,
    ],
}  # fmt: skip

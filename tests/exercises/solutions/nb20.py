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


def not_moved(head, hidden, labels, chunk):
    return next_token_loss(
        head,
        torch.cat([hidden, hidden[-1:]]),
        torch.cat([labels[:1], labels]),
        chunk,
    )


def divides_by_all(head, hidden, labels, chunk):
    mean = next_token_loss(head, hidden, labels, chunk)
    return mean * (labels[1:] != -100).sum() / (len(labels) - 1)


def at_random(x, step):
    return (x / step + torch.rand_like(x)).floor() * step


def to_nearest(x, step):
    return (x / step).round() * step


def half_and_half(x, step):
    return (x / step).floor() * step + step * torch.randint_like(x, 2)


def noisy(x, step):
    return x + step * (torch.rand_like(x) - 0.5)


RIGHT = {"20.1": 4 * 2048 * 128_256 * 4, "20.2": next_token_loss, "20.3": at_random}
WRONG = {
    "20.1": [4 * 2048 * 128_256, 4 * 2048 * 128_256 * 2, 2048 * 128_256 * 4, 3.9, "4 GB"],
    "20.2": [keeps_the_logits, all_at_once, not_moved, divides_by_all, 3],
    "20.3": [to_nearest, half_and_half, noisy, lambda x, step: x, 3],
}

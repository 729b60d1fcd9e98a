"""Answers to the exercises of notebook 20, right and wrong."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.exercises import mistakes


def next_token_loss(head, hidden, labels, chunk, wrong=""):
    """`wrong` is the mistake that it makes."""

    def part(states, wanted):
        return F.cross_entropy(head(states), wanted, reduction="sum")

    def kept(part, *pair, use_reentrant):
        return part(*pair)

    wanted, apart = labels if wrong == "not moved" else labels[1:], checkpoint
    states = hidden if wrong == "not moved" else hidden[:-1]
    if wrong == "keeps the logits":
        apart = kept
    pairs = zip(
        *(one.split(len(one) if wrong == "all at once" else chunk) for one in (states, wanted))
    )
    total = sum(apart(part, *pair, use_reentrant=False) for pair in pairs)
    return total / (len(wanted) if wrong == "divides by all" else (wanted != -100).sum())


def at_random(x, step):
    return (x / step + torch.rand_like(x)).floor() * step


RIGHT = {"20.1": 4 * 2048 * 128_256 * 4, "20.2": next_token_loss, "20.3": at_random}
WRONG = {
    "20.1": [4 * 2048 * 128_256, 4 * 2048 * 128_256 * 2, 2048 * 128_256 * 4, 3.9, "4 GB"],
    "20.2": [
        *mistakes(
            next_token_loss, "keeps the logits", "all at once", "divides by all", "not moved"
        ),
        3,
    ],
    "20.3": [
        lambda x, step: (x / step).round() * step,
        lambda x, step: ((x / step).floor() + torch.randint_like(x, 2)) * step,
        lambda x, step: x + step * (torch.rand_like(x) - 0.5), lambda x, step: x, 3,
    ],
}  # fmt: skip

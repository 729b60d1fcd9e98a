"""Answers to the exercises of notebook 16, right and wrong."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from by_hand.collectives import ring_all_reduce
from by_hand.exchange import Ring
from tests.exercises import mistakes


def step_bytes(layers, rows, tokens, hidden, ranks, itemsize):
    return 4 * layers * 2 * (ranks - 1) / ranks * rows * tokens * hidden * itemsize


def rows_linear(transport, x, weight, bias, wrong=""):
    """`wrong` is the mistake that it makes."""
    if wrong == "the bias in the sum":
        return ring_all_reduce(transport, F.linear(x, weight, bias))
    if wrong == "the bias is sent too":
        bias = ring_all_reduce(transport, bias) / transport.ranks
    out = ring_all_reduce(transport, F.linear(x, weight))
    return out if wrong == "no bias" else out + bias


def likeliest(transport, logits, begin, side=-1):
    """Of words with the same logit the first, or with side=1 the last."""
    exchange = Ring(transport)
    highest = logits.amax(-1)
    word = (logits == highest[..., None]).int().argmax(-1) + begin
    top = exchange.reduce(highest, op="max")
    return side * exchange.reduce(torch.where(highest == top, side * word, -(2**60)), op="max")


def gathers_everything(transport, logits, begin):
    exchange = Ring(transport)
    total = exchange.reduce(torch.tensor([logits.shape[-1]])).item()
    whole = exchange.gather(logits, -1, total)
    return (whole == whole.amax(-1, keepdim=True)).int().argmax(-1)


RIGHT = {"16.1": step_bytes, "16.2": rows_linear, "16.3": likeliest, "16.4": 5}
WRONG = {
    "16.1": [
        lambda *job: step_bytes(*job) / 2, lambda *job: 4 * math.prod((*job[:4], job[5])),
        lambda *job: step_bytes(*job[:5], 4), 7,
    ],
    "16.2": [
        *mistakes(rows_linear, "the bias in the sum", "no bias", "the bias is sent too"),
        lambda transport, x, weight, bias: F.linear(x, weight, bias), 2,
    ],
    "16.3": [gathers_everything, partial(likeliest, side=1), 3],
    "16.4": [4, 6, 8, 2, "5", 3],
}  # fmt: skip

"""Answers to the exercises of notebook 24, right and wrong."""

import math
from functools import partial

import torch


def merge(output_a, sum_a, output_b, sum_b):
    both = torch.logaddexp(sum_a, sum_b)
    weight_a, weight_b = (sum_a - both).exp(), (sum_b - both).exp()
    return weight_a[:, None] * output_a + weight_b[:, None] * output_b, both


def overflows(output_a, sum_a, output_b, sum_b):
    a, b = sum_a.exp()[:, None], sum_b.exp()[:, None]
    return (a * output_a + b * output_b) / (a + b), (a + b).log()[:, 0]


def pairs(tokens, ranks, rank, zigzag):
    if not zigzag:
        size = tokens // ranks
        places = range(rank * size, (rank + 1) * size)
        return sum(place + 1 for place in places)
    size = tokens // (2 * ranks)
    first = range(rank * size, (rank + 1) * size)
    last = range(tokens - (rank + 1) * size, tokens - rank * size)
    return sum(place + 1 for place in (*first, *last))


def dropped(chosen, capacity, whole=math.ceil, least=0):
    seats = whole(capacity * sum(chosen) / len(chosen))
    return abs(sum(max(least, count - seats) for count in chosen))


RIGHT = {"24.1": merge, "24.2": pairs, "24.3": dropped}
WRONG = {
    "24.1": [
        overflows,
        lambda *both: ((both[0] + both[2]) / 2, torch.logaddexp(both[1], both[3])),
        lambda *both: (merge(*both)[0], both[1] + both[3]), lambda *both: merge(*both)[0], 3,
    ],
    "24.2": [
        lambda tokens, ranks, *how: pairs(tokens, ranks, *how) - tokens // ranks,
        lambda tokens, ranks, rank, zigzag: tokens * (tokens + 1) / 2 / ranks,
        lambda tokens, ranks, rank, zigzag: pairs(tokens, ranks, rank, False), 36,
    ],
    "24.3": [
        partial(dropped, whole=int), partial(dropped, least=-math.inf),
        lambda chosen, capacity: dropped(chosen, 1.0), 2,
    ],
}  # fmt: skip

"""Answers to the exercises of notebook 19, right and wrong."""

import itertools
import math
from functools import partial

from helpers.ladder import START
from helpers.recipe import replace


def one_order(peak, names):
    found, on = {}, frozenset()
    for name in names:
        found[name] = peak(on) - peak(on | {name})
        on |= {name}
    return found


def taken_away(peak, names):
    return {name: peak(frozenset(names) - {name}) - peak(frozenset(names)) for name in names}


def by_sets(peak, names, weighed=True):
    """Means over all sets of the others: of each size first, or of all sets alike."""
    found = {}
    for name in names:
        rest = [other for other in names if other != name]
        weights = {size: len(names) * math.comb(len(rest), size) for size in range(len(names))}
        found[name] = sum(
            (peak(frozenset(part)) - peak(frozenset(part) | {name}))
            / (weights[size] if weighed else 2 ** len(rest))
            for size in weights
            for part in itertools.combinations(rest, size)
        )
    return found


small = replace(
    START, precision="fp16", checkpointing=True, optimizer="adamw8bit_embed32", frozen=12,
    accumulation=16,
)  # fmt: skip

RIGHT = {
    "19.1": ("lora_rank", "checkpointing"),
    "19.2": small,
    "19.3": {"checkpointing", "freezing"},
    "19.4": by_sets,
}
WRONG = {
    "19.1": [
        ("optimizer", "checkpointing"), ("lora_rank", "optimizer"), ("lora_rank", "lora_rank"), 3,
    ],
    "19.2": [
        replace(small, accumulation=4), replace(small, lora_rank=8), replace(small, length=256),
        replace(small, frozen=18), replace(small, precision="bf16"), 3,
    ],
    "19.3": [
        {"checkpointing"}, {"checkpointing", "freezing", "accumulation"},
        {"accumulation", "bf16", "LoRA"}, set(), {"length"}, 3,
    ],
    "19.4": [one_order, taken_away, partial(by_sets, weighed=False), lambda peak, names: 0, 3],
}  # fmt: skip

"""Answers to the exercises of notebook 19, right and wrong."""

import itertools
import math

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


def by_sets(peak, names):
    found = {}
    for name in names:
        rest = [other for other in names if other != name]
        sets = [
            frozenset(part)
            for size in range(len(names))
            for part in itertools.combinations(rest, size)
        ]
        found[name] = sum(peak(on) - peak(on | {name}) for on in sets) / len(sets)
    return found


def by_sets_weighed(peak, names):
    found = {}
    for name in names:
        rest = [other for other in names if other != name]
        found[name] = sum(
            (peak(frozenset(part)) - peak(frozenset(part) | {name}))
            / (len(names) * math.comb(len(rest), size))
            for size in range(len(names))
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
    "19.4": by_sets_weighed,
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
    "19.4": [one_order, taken_away, by_sets, lambda peak, names: 0, 3],
}  # fmt: skip

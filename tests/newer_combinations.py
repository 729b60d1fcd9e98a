"""Recipes in which every two values of a newer field and of any field meet, where they may meet.

The list is kept, and a test asks that no pair is missing. `python -m tests.newer_combinations`
makes it anew, by drawing many recipes at random and taking the one with most new pairs each time.
"""

import random
from itertools import combinations

from helpers.recipe import Recipe
from tight_fit.checks import PRECISIONS
from tight_fit.optimizer_kinds import OPTIMIZERS
from tight_fit.techniques.rules import ATTENTIONS, BASES, LORA_TARGETS, LOSSES, OFFLOADS

OLDER = {
    "model": ("vit", "deberta", "decoder"),
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "accumulation": (1, 4),
    "checkpointing": (False, True),
    "frozen": (None, 2),
    "lora_rank": (None, 4),
}
NEWER = {
    "base": BASES,
    "lora_targets": LORA_TARGETS,
    "attention": ATTENTIONS,
    "loss": LOSSES,
    "offload": (None, *OFFLOADS),
    "optimizer_in_backward": (False, True),
}
VALUES = OLDER | NEWER
# What the fields are where nothing is said; a recipe here says only what differs.
USUAL = {name: values[0] for name, values in VALUES.items()}


def recipe(changes: dict, **others) -> Recipe:
    """A small recipe. Raises ValueError where the fields do not go together."""
    fields = USUAL | changes
    sizes = {} if fields["model"] == "vit" else {"length": 32}
    norm = None if fields["optimizer_in_backward"] else 1.0
    return Recipe(batch_size=4, max_grad_norm=norm, **sizes, **fields, **others)


def name(changes: dict) -> str:
    """The fields that differ, as the id of a test."""
    return "-".join(f"{key}={value}" for key, value in changes.items())


def pairs(changes: dict) -> set:
    """The pairs of (field, value) in a recipe, at least one of them of a newer field."""
    fields = USUAL | changes
    return {
        frozenset(pair)
        for pair in combinations(fields.items(), 2)
        if any(field in NEWER for field, _ in pair)
    }


def drawn(count: int, seed: int = 0) -> list[dict]:
    """So many recipes that may be, drawn at random: what differs in each."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        fields = {key: draw.choice(values) for key, values in VALUES.items()}
        changes = {key: value for key, value in fields.items() if value != USUAL[key]}
        try:
            recipe(changes)
        except ValueError:
            continue
        found.append(changes)
    return found


def cover(candidates: list[dict]) -> list[dict]:
    """A few of the candidates that hold every pair of all of them."""
    held = [pairs(changes) for changes in candidates]
    left, chosen = set().union(*held), []
    while left:
        best = max(range(len(held)), key=lambda index: len(held[index] & left))
        chosen.append(candidates[best])
        left -= held[best]
    return chosen


DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# A digit for each field of VALUES: the number of its value.
KEPT = """
    0a10001210021 2a21001001100 1001110100010 2300111111111 0730110001020 2b31111210100
    0210000101001 1520001010021 2411001201010 2621000101120 1101101210000 1900101000021
    0310011000010 2521001201100 2821110100010 2710011110101 0600101010001 2b00010101021
    2400101010101 2220111210120 2110010001121 2921011211100 2020011011121 2820010101101
    0410111110021 0010011200001 0331011201010 0900000101000 2b31111011000 2120101110001
    2200110000101 1321111010020 1721011210020 2301001010100 1520011110020 2a10001101021
    2631011210000 0810010101020
""".split()
ALL = [
    {
        key: values[DIGITS.index(digit)]
        for (key, values), digit in zip(VALUES.items(), digits)
        if values[DIGITS.index(digit)] != USUAL[key]
    }
    for digits in KEPT
]

if __name__ == "__main__":
    for changes in cover(drawn(20_000)):
        fields = USUAL | changes
        print("".join(DIGITS[values.index(fields[key])] for key, values in VALUES.items()))

"""Recipes in which every two values of a newer field and of any field meet, where they may meet.

The list is kept, and a test asks that no pair is missing. `python -m tests.newer_combinations`
makes it anew, by drawing many recipes at random and taking the one with most new pairs each time.
"""

import random
from itertools import combinations

from helpers.recipe import Recipe
from tight_fit.checks import PRECISIONS
from tight_fit.optimizer_kinds import OPTIMIZERS
from tight_fit.techniques.rules import (
    ATTENTIONS,
    BASES,
    LORA_TARGETS,
    LOSSES,
    OFFLOADS,
    SCALINGS,
)

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
    "float8": (None, *SCALINGS),
}
VALUES = OLDER | NEWER
# What the fields are where nothing is said; a recipe here says only what differs.
USUAL = {name: values[0] for name, values in VALUES.items()}


def recipe(changes: dict, **others) -> Recipe:
    """A small recipe. Raises ValueError where the fields do not go together."""
    fields = USUAL | changes
    if fields["float8"] and fields["model"] == "vit":
        raise ValueError("FP8 takes multiples of 16 rows, and an image has 17 tokens.")
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
    2a000001010000 25201110101210 13110000000101 06311112110000 28100001011212 00001112000110
    12211001000002 24110012111100 21001000011011 19311112100200 0b010111100200 27200001011211
    14001000000112 07310100000000 23100112111010 21210012100200 08211001000100 26000001001211
    20311010111200 22101010111210 29100000011011 25000001010002 2b201000011011 2a100010101210
    23200001001202 24100001001201 20001001010002 26210000010202 27110112100200 21111001001002
    29200001011212 28111001011001 12001000000201 05001012000000 22200012110210 14200100000010
    1a000001000002 2a010012011000 20211001001201 2b311012010000 27010000001002 24300112000100
    2a000001001011 2b110001001002 15000001000201
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

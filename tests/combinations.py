"""Recipes in which every two values of every two fields meet, where they may meet.

The list is kept, and a test asks that no pair is missing. `python -m tests.combinations` makes it
anew, by drawing many recipes at random and taking the one with most new pairs each time.
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

VALUES = {
    "model": ("vit", "deberta", "decoder"), "optimizer": OPTIMIZERS, "precision": PRECISIONS,
    "accumulation": (1, 4), "checkpointing": (False, True), "frozen": (None, 2),
    "lora_rank": (None, 4), "base": BASES, "lora_targets": LORA_TARGETS, "attention": ATTENTIONS,
    "loss": LOSSES, "offload": (None, *OFFLOADS), "optimizer_in_backward": (False, True),
    "float8": (None, *SCALINGS),
}  # fmt: skip
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
    """The pairs of (field, value) in a recipe."""
    return {frozenset(pair) for pair in combinations((USUAL | changes).items(), 2)}


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
    2a000001010000 00111112100200 24201000001112 27310110111000 15100001000211 03200012110110
    11011000000001 22001111011210 28110001011102 1b301112000000 06211101000000 29211000011201
    19100111100010 17001001000212 24010112110100 00300000010100 21200112111210 23111000001202
    05011110110000 12211000000002 26100012111210 2b010001011201 0a311110100200 08201101000210
    20001001001011 13000001000111 0b101010100210 14100001000201 02100012110010 25300112011000
    1a100000000012 16010000000202 18000001000011 23300112000000 07101112000200 10200001000202
    04310010000000 21111001001002 09310112000000 2a201000011011 17201000000011 01311010110000
    2b200000001212 25201001000002 29001000000012 12001000000201 26311010111200 2a010012011000
    26110001010201 22300012000000
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

"""Recipes in which every two values of every two fields meet, where they may meet.

The list is kept, and a test asks that no pair is missing. `python -m tests.combinations` makes it
anew, by drawing many recipes at random and taking the one with most new pairs each time.
"""

import random
from itertools import combinations

from helpers.recipe import Recipe
from tight_fit.checks import PRECISIONS
from tight_fit.optimizer_kinds import OPTIMIZERS
from tight_fit.techniques.rules import ATTENTIONS, BASES, LORA_TARGETS, LOSSES, OFFLOADS

VALUES = {
    "model": ("vit", "deberta", "decoder"),
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "accumulation": (1, 4),
    "checkpointing": (False, True),
    "frozen": (None, 2),
    "lora_rank": (None, 4),
    "base": BASES,
    "lora_targets": LORA_TARGETS,
    "attention": ATTENTIONS,
    "loss": LOSSES,
    "offload": (None, *OFFLOADS),
    "optimizer_in_backward": (False, True),
}
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
    0a10001210021 2521010101100 1001100000010 2100111011101 0731111201020 1420101110011
    2330000000120 1b11011210000 0810000101011 2910101201101 2201010100020 0621101010020
    2030011211110 1500101210021 2411010001120 0220101211001 0121000100020 2b00100001121
    1931011010000 2a21110101100 0301111211000 2710001110101 2610011201101 2800110100120
    0010001100021 0920000101021 1310001100011 1600110100021 0400011210001 1821100100000
    1720100000021 2230000000100 0510110001021 1110011200000 1a01111000000 0b20101101021
    0020110001000 1210111010021 2431101201100 0900000101000 2b31111011000 1321111010020
    1700001000021 2631011210000 2a31101011000 2131110000120 0530001210000
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

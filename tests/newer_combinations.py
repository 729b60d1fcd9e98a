"""Recipes in which every two values of a newer field and of any field meet, where they may meet.

The list is kept, and a test asks that no pair is missing. `python -m tests.newer_combinations`
makes it anew, by drawing many recipes at random and taking the one with most new pairs each time.
"""

import random
from itertools import combinations

from helpers.recipe import Recipe
from tight_fit.checks import OPTIMIZERS, PRECISIONS
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


# A digit for each field of VALUES: the number of its value.
KEPT = """
    1210011000000 2410101211121 0321100101010 2800010100111 0531011210020 2631100001100
    0000011011001 1720001110021 2100101200020 1410111210010 2721101201100 2510101101101
    2320000000121 2030101200110 2600111110021 2100101111101 2210101111121 0810110101000
    2421010000100 0311111211000 0010001110021 2600101201120 2410011111100 0720011000020
    2201001201100 0510111001000 2100010000121 0410101010010 2810010100121
""".split()
ALL = [
    {
        key: values[int(digit)]
        for (key, values), digit in zip(VALUES.items(), digits)
        if values[int(digit)] != USUAL[key]
    }
    for digits in KEPT
]

if __name__ == "__main__":
    for changes in cover(drawn(20_000)):
        fields = USUAL | changes
        print("".join(str(values.index(fields[key])) for key, values in VALUES.items()))

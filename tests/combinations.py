"""Recipes in which every two values of every two fields meet at least once."""

from itertools import combinations, product

from helpers.recipe import Recipe
from tight_fit.checks import PRECISIONS

VALUES = {
    "model": ("deberta", "vit", "decoder"),
    # Two more are in newer_combinations.
    "optimizer": (
        "adamw",
        "adamw8bit",
        "adamw8bit_embed32",
        "sgd",
        "adafactor",
        "lion",
        "lion8bit",
    ),
    "precision": PRECISIONS,
    "accumulation": (1, 4),
    "checkpointing": (False, True),
    "frozen": (None, 2),
    "lora_rank": (None, 4),
}


def _pairs(fields: dict) -> set:
    return {frozenset(pair) for pair in combinations(fields.items(), 2)}


def covering() -> list[dict]:
    """Recipes' fields that hold every pair of values, in the same order each time.

    Greedy: of all combinations, add the one with most pairs not met yet, until none is left.
    """
    everything = [dict(zip(VALUES, values)) for values in product(*VALUES.values())]
    pairs = [_pairs(fields) for fields in everything]
    left, chosen = set.union(*pairs), []
    while left:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index] & left))
        chosen.append(everything[best])
        left -= pairs[best]
    return chosen


PLAIN = [
    {name: values[0] for name, values in VALUES.items()} | {"model": model}
    for model in VALUES["model"]
]
ALL = PLAIN + [fields for fields in covering() if fields not in PLAIN]


def recipe(fields: dict, **others) -> Recipe:
    length = {} if fields["model"] == "vit" else {"length": 32}
    return Recipe(batch_size=8, **length, **fields, **others)


def name(fields: dict) -> str:
    plain = {key: values[0] for key, values in VALUES.items()}
    changed = [
        f"{key}={value}" for key, value in fields.items() if value != plain[key] and key != "model"
    ]
    return "-".join([fields["model"], *changed]) if changed else f"{fields['model']}-plain"

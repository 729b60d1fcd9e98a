"""Whether a machine has room for a step that is to be measured, by the step's plan."""

from __future__ import annotations

from helpers.recipe import Recipe

MEMORY_FRACTION = 0.8  # of the machine's memory, which plans may fill


def has_room(recipe: Recipe, peak: int, memory: int) -> bool:
    """Whether a step with this planned peak is measured on a machine with so much memory, in bytes.

    A rehearsal on a pretended GPU, whose models are narrow, takes the recipe's peak at its true
    size in the place of `peak`.
    """
    return peak <= MEMORY_FRACTION * memory

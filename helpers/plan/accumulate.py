"""Micro-batches that are small enough for the GPU that is here, by plan."""

from __future__ import annotations

from helpers.plan.planner import plan
from helpers.recipe import Recipe, replace
from tight_fit import gpus
from tight_fit.checks import of_type

ROOM = 0.05  # fraction of the memory that stays free, for what a plan cannot know


def fitting(*recipes: Recipe) -> list[Recipe]:
    """The recipes with the fewest micro-batches per step with which all of them fit this machine.

    All get the same accumulation, so that two that differ in one field still do: that of the first
    one, or the next of its doubles that divides the batch. A sentence is printed where it changes.
    By plan, of the GPU's whole memory less `ROOM`. Recipes of the mini profile stay as they are.
    Raises TypeError for what is no recipe.
    """
    for recipe in recipes:
        of_type("recipe", recipe, Recipe)
    if all(recipe.profile == "mini" for recipe in recipes):
        return list(recipes)
    first, gpu = recipes[0], gpus.here()
    counts = [first.accumulation]
    while not any(recipe.batch_size % (2 * counts[-1]) for recipe in recipes):
        counts.append(2 * counts[-1])
    parts = [[replace(recipe, accumulation=count) for recipe in recipes] for count in counts]
    found = next((these for these in parts if all(_fits(one, gpu) for one in these)), None)
    if found is None:
        print(
            f"By plan {gpu.name} does not hold this step even in {counts[-1]} micro-batches: set "
            "TIGHT_FIT_PROFILE=mini and restart the kernel."
        )
        return parts[-1]
    if found != parts[0]:
        print(
            f"To fit {gpu.name}, each step runs in {found[0].accumulation} micro-batches of "
            f"{found[0].micro_batch}, by plan."
        )
    return found


def _fits(recipe: Recipe, gpu: gpus.GPU) -> bool:
    return plan(recipe, gpus.device_of(gpu)).fits(gpu).need <= (1 - ROOM) * gpu.memory

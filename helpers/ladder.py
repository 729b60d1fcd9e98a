"""The techniques for one GPU, one after the other as a ladder.

Each rung of the ladder changes one field of the same fine-tune. A rung can also be taken away from
the full stack, or be used alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from helpers.recipe import Recipe, replace
from tight_fit import gpus
from tight_fit.checks import each_of_type, of_type, real, shown
from tight_fit.gpus import GPU
from tight_fit.memory.plan import Plan

START = Recipe("deberta-large", profile="full", length=512, batch_size=16)
SHORT = Recipe("deberta", profile="full", length=32, batch_size=4)  # too small for the ladder
FIRST = "fp32"
# Tokens per example. With the length of the start they determine the FLOPs of a step, which are a
# polynomial of degree two in the length.
SHORTER = (128, 256)


def rungs(start: Recipe, half: str = "bf16") -> dict[str, dict]:
    """{name: fields of the recipe that the rung changes}, in order; the first rung changes nothing.

    half  the 16-bit precision of the GPU: "bf16", or "fp16" where it has no bf16 (`GPU.bf16`)
    Raises ValueError for another precision.
    """
    of_type("start", start, Recipe)
    if half not in ("bf16", "fp16"):
        raise ValueError(
            f"half={shown(half)} is no 16-bit precision: use bf16, or fp16 for a GPU without it."
        )
    return {
        FIRST: {},
        "accumulation": {"accumulation": 4},
        "mixed precision": {"precision": half},
        "dynamic padding": {"padding": "dynamic"},
        "uniform padding": {"padding": "uniform"},
        "checkpointing": {"checkpointing": True},
        "8-bit optimizer": {"optimizer": "adamw8bit_embed32"},
        "freezing": {"frozen": start.layers // 2},
        "LoRA": {"lora_rank": 8},
    }


def climb(start: Recipe, steps: Mapping[str, dict] | None = None) -> dict[str, Recipe]:
    """{name: recipe} on the way up: each rung keeps what those before it changed.

    Raises TypeError for a start that is no `Recipe`, and for steps that are no dict of dicts;
    ValueError for a field that a recipe does not have.
    """
    of_type("start", start, Recipe)
    if steps is not None:
        each_of_type("steps", steps, dict)
    recipes, recipe = {}, start
    for name, change in (rungs(start) if steps is None else steps).items():
        recipes[name] = recipe = Recipe.from_dict(recipe.to_dict() | change)
    return recipes


def top(start: Recipe, steps: Mapping[str, dict] | None = None) -> Recipe:
    """The full stack: the recipe of the last rung."""
    return list(climb(start, steps).values())[-1]


def without(start: Recipe, steps: Mapping[str, dict] | None = None) -> dict[str, Recipe]:
    """{name: the full stack, but with the fields of this rung as they were at the start}.

    A rung whose fields a later rung sets again is left out: the full stack does not contain it.
    Raises what `climb` raises.
    """
    steps = rungs(start) if steps is None else steps
    full = top(start, steps)
    return {
        name: replace(full, **{field: getattr(start, field) for field in change})
        for name, change in steps.items()
        if change and _lasts(change, full)
    }


def alone(start: Recipe, steps: Mapping[str, dict] | None = None) -> dict[str, Recipe]:
    """{name: the start with the fields of this rung and no others}, for the rungs of `without`."""
    steps = rungs(start) if steps is None else steps
    return {name: replace(start, **steps[name]) for name in without(start, steps)}


def _lasts(change: dict, full: Recipe) -> bool:
    return all(getattr(full, field) == value for field, value in change.items())


def own_rate(recipe: Recipe, factor: float = 5.0) -> Recipe:
    """The recipe with a learning rate that suits adapters.

    It is a multiple of the one that suits training all weights (notebook 07).
    """
    of_type("recipe", recipe, Recipe)
    real("factor", factor, above=0)
    return replace(recipe, learning_rate=factor * recipe.peak_learning_rate)


def smallest(planned: Plan) -> tuple[GPU, str] | None:
    """(the GPU with the least memory that the planned step fits, precision to use on it).

    None where no GPU of the list holds it. A step in 16 bits may run on any GPU: in bf16 where the
    hardware has it, else in fp16, which needs a few bytes more for the loss scale.
    """
    if not isinstance(planned, Plan):
        raise TypeError(f"planned={shown(planned)} must be a plan: plan(recipe) gives one.")
    for gpu in sorted(gpus.GPUS.values(), key=lambda gpu: gpu.memory):
        if planned.fits(gpu):
            half = planned.recipe.precision in ("bf16", "fp16")
            return gpu, ("bf16" if gpu.bf16 else "fp16") if half else planned.recipe.precision
    return None


# What a T4 may choose from: all weights trained, in fp16.
T4 = {
    f"{16 // parts} examples at a time" + (", checkpointing" if again else ""): replace(
        START, precision="fp16", padding="uniform", accumulation=parts, checkpointing=again
    )
    for parts, again in ((4, False), (8, False), (4, True))
}

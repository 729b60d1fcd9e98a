"""The ladder: all techniques of one GPU, one after the other on the same fine-tune, and each taken away again.

A plan of the large model takes some seconds, so those that notebook 19 shows are kept in docs/ladder.json, made by
`write()` (`python -m helpers.strategy.ladder`); a test plans every fourth of them anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from helpers import gpus
from helpers.gpus import GPU
from helpers.memory.timeline import Plan
from helpers.plan.planner import plan, plan_key
from helpers.recipe import Recipe, difference, replace

FILE = Path(__file__).parents[2] / "docs" / "ladder.json"
START = Recipe("deberta-large", profile="full", length=512, batch_size=16)
FIRST = "fp32"
SHORTER = (
    128,
    256,
)  # tokens: with those of the start, what fixes a step's FLOPs as a polynomial in the length


def rungs(start: Recipe, half: str = "bf16") -> dict[str, dict]:
    """{name: fields of the recipe that this rung changes}, in order, from the first rung, which changes nothing.

    half  the 16-bit precision of the card: "bf16", or "fp16" where bf16 is not in the hardware (`Card.bf16`)
    Raises ValueError for another precision.
    """
    if half not in ("bf16", "fp16"):
        raise ValueError(
            f"half={half!r} is no 16-bit precision: use bf16, or fp16 for a card without it."
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
    """{name: recipe} on the way up: each rung keeps what those before it changed."""
    found, recipe = {}, start
    for name, change in (rungs(start) if steps is None else steps).items():
        found[name] = recipe = replace(recipe, **change)
    return found


def top(start: Recipe, steps: Mapping[str, dict] | None = None) -> Recipe:
    """The full stack."""
    return list(climb(start, steps).values())[-1]


def without(start: Recipe, steps: Mapping[str, dict] | None = None) -> dict[str, Recipe]:
    """{name: the full stack with this rung's fields as they were at the start}. A rung whose fields a later one sets
    again is not in it: in the full stack it is not there to be taken away."""
    steps, full = (rungs(start) if steps is None else steps), top(start, steps)
    return {
        name: replace(full, **{field: getattr(start, field) for field in change})
        for name, change in steps.items()
        if change and _lasts(change, full)
    }


def alone(start: Recipe, steps: Mapping[str, dict] | None = None) -> dict[str, Recipe]:
    """{name: the start with this rung's fields and no others}, of the same rungs as `without`."""
    steps = rungs(start) if steps is None else steps
    return {name: replace(start, **steps[name]) for name in without(start, steps)}


def _lasts(change: dict, full: Recipe) -> bool:
    return all(getattr(full, field) == value for field, value in change.items())


def own_rate(recipe: Recipe, factor: float = 5.0) -> Recipe:
    """The recipe at the rate that adapters want: a multiple of the one that suits all weights (notebook 07)."""
    return replace(recipe, learning_rate=factor * recipe.peak_learning_rate)


def smallest(planned: Plan | Kept) -> tuple[GPU, str] | None:
    """(the card with the least memory that holds the plan, precision to use on it), None where no card does.

    A 16-bit plan may run on any card: in bf16 where the hardware has it, else in fp16, whose loss scale is a few bytes.
    """
    for gpu in sorted(gpus.GPUS.values(), key=lambda gpu: gpu.memory):
        if planned.fits(gpu):
            half = planned.recipe.precision in ("bf16", "fp16")
            return gpu, ("bf16" if gpu.bf16 else "fp16") if half else planned.recipe.precision
    return None


@dataclass(frozen=True)
class Kept:
    """What is kept of a plan for a GPU. Fields as in `Plan`: bytes at the peak, in all and by category, and those that the
    allocator needs beside them; the phase the peak falls in; {phase: FLOPs a step}."""

    recipe: Recipe
    peak: int
    overhead: int
    at_peak: dict[str, int]
    peak_phase: str
    flops: dict[str, int]

    fits = Plan.fits


def planned(recipe: Recipe) -> Plan | Kept:
    """The plan of a recipe for a GPU: as it was kept, or made now."""
    kept = _read().get(plan_key(recipe))
    return replace(kept, recipe=recipe) if kept else plan(recipe)


def everything() -> list[Recipe]:
    """The recipes whose plans are kept, each shape once: the ladder up, each rung taken away, each alone, start and full
    stack at shorter lengths, what a T4 may choose from, and a small step, for which the ladder is too long."""
    shorter = [
        replace(recipe, length=length) for recipe in (START, top(START)) for length in SHORTER
    ]
    found = [
        *climb(START).values(),
        *without(START).values(),
        *alone(START).values(),
        *shorter,
        *T4.values(),
        SHORT,
        top(SHORT),
        replace(SHORT, lora_rank=8),
    ]
    return list(dict.fromkeys(map(plan_key, found)))


# What a T4 may choose from: everything trained, in fp16.
T4 = {
    f"{16 // parts} rows at a time" + (", checkpointing" if again else ""): replace(
        START, precision="fp16", padding="uniform", accumulation=parts, checkpointing=again
    )
    for parts, again in ((4, False), (8, False), (4, True))
}

SHORT = Recipe("deberta", profile="full", length=32, batch_size=4)


def row(recipe: Recipe) -> dict:
    """A recipe's plan, made now, as it is kept: the fields in which it differs from the start, and the figures."""
    made = plan(recipe)
    return {
        "change": {name: value for name, (_, value) in difference(plan_key(START), recipe).items()},
        "peak": made.peak,
        "overhead": made.overhead,
        "at_peak": made.at_peak,
        "peak_phase": made.peak_phase,
        "flops": made.flops,
    }


def write() -> None:
    """Plan everything anew (a minute or two) and keep it."""
    FILE.write_text(
        json.dumps([row(recipe) for recipe in everything()], indent=1) + "\n", encoding="utf8"
    )


def read() -> list[dict]:
    return json.loads(FILE.read_text(encoding="utf8"))


@lru_cache(maxsize=1)
def _read() -> dict[Recipe, Kept]:
    found = {}
    for kept in read():
        recipe = replace(plan_key(START), **kept["change"])
        found[recipe] = Kept(
            recipe, *(kept[name] for name in ("peak", "overhead", "at_peak", "peak_phase", "flops"))
        )
    return found


if __name__ == "__main__":
    write()

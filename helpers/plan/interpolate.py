"""A plan for every batch size and length at once, for sliders.

The same operations run whatever the shape; only sizes change. A storage of a transformer holds
(a + b·rows)·(1, length, length²) elements, so six traces of small shapes give each storage's size as a polynomial,
and a seventh, at a point not used, checks all of them. The peak is then searched on the recomputed timeline, wherever it moves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from helpers.memory.timeline import Plan, to_plan
from helpers.plan.planner import plan_key, trace_recipe
from helpers.recipe import Recipe

ROWS = {
    False: (2, 3),
    True: (1,),
}  # a single row takes other operations (nothing to transpose): its own surface
LENGTHS = (24, 40, 64)
CHECK = {False: (5, 56), True: (1, 56)}


class PlanInterpolation:
    """`PlanInterpolation(recipe, target).plan(recipe with another batch_size or length)`, in milliseconds.

    Making one takes seven small traces. Raises RuntimeError if the model's sizes are no such polynomial.
    """

    def __init__(self, recipe: Recipe, target: str):
        self.recipe, self.target = recipe, target
        self.single = recipe.micro_batch == 1
        text = recipe.task == "text"
        points = [
            (rows, length)
            for rows in ROWS[self.single]
            for length in (LENGTHS if text else (None,))
        ]
        traces = [trace_recipe(_resized(recipe, *point), target) for point in points]
        rows, length = CHECK[self.single]
        check = (rows, length if text else None)
        checked = trace_recipe(_resized(recipe, *check), target)
        self.storage_trace, self.parameters = checked
        if any(storage_trace.events != self.storage_trace.events for storage_trace, _ in traces):
            raise RuntimeError(
                "This model takes other operations at other shapes: plan each shape by itself."
            )
        basis = np.array([self._basis(*point) for point in points])
        sizes = np.array([storage_trace.bytes for storage_trace, _ in traces], dtype=float)
        flops = np.array(
            [list(storage_trace.flops.values()) for storage_trace, _ in traces], dtype=float
        )
        self.sizes = np.linalg.solve(basis, sizes)
        self.flops = np.linalg.solve(basis, flops)
        if not (
            np.array_equal(self._sizes(*check), self.storage_trace.bytes)
            and np.array_equal(self._flops(*check), list(self.storage_trace.flops.values()))
        ):
            raise RuntimeError(
                "This model's sizes are no polynomial of rows and length: plan each shape by itself."
            )

    def _sizes(self, rows: int, length: int | None) -> np.ndarray:
        return np.rint(np.array(self._basis(rows, length)) @ self.sizes).astype(np.int64)

    def _flops(self, rows: int, length: int | None) -> np.ndarray:
        return np.rint(np.array(self._basis(rows, length)) @ self.flops).astype(np.int64)

    def _basis(self, rows: int, length: int | None) -> list[float]:
        powers = (1, length, length**2) if length else (1,)
        return [
            factor * power for factor in ((1,) if self.single else (1, rows)) for power in powers
        ]

    def plan(self, recipe: Recipe) -> Plan:
        """The plan of a recipe that differs in batch_size, length or number of micro-batches (one stays one)."""
        if _key(recipe) != _key(self.recipe):
            raise ValueError(
                "This surface was made for a recipe that differs in more than batch size and length, "
                "or has one row a micro-batch where the other has several."
            )
        shape = recipe.micro_batch, recipe.tokens
        groups = recipe.accumulation / min(recipe.accumulation, 2)
        plan = to_plan(
            (self.storage_trace, self.parameters), recipe, self.target, self._sizes(*shape)
        )
        flops = dict(
            zip(self.storage_trace.flops, (int(value * groups) for value in self._flops(*shape)))
        )
        return replace(plan, flops=flops)


def interpolation(recipe: Recipe, target: str = "cuda") -> PlanInterpolation:
    """The surface through a recipe, made once and kept."""
    return _interpolation(_key(recipe), target)


def plan_at(plan: Plan, batch_size: int | None = None, length: int | None = None) -> Plan:
    """The plan of the same recipe for another batch size or length, in milliseconds once its interpolation is made."""
    changed = replace(
        plan.recipe,
        **{
            name: value for name, value in (("batch_size", batch_size), ("length", length)) if value
        },
    )
    return interpolation(changed, plan.target).plan(changed)


@lru_cache(maxsize=32)
def _interpolation(recipe: Recipe, target: str) -> PlanInterpolation:
    return PlanInterpolation(recipe, target)


def _resized(recipe: Recipe, rows: int, length: int | None) -> Recipe:
    """The recipe with micro-batches of `rows`; one or two of them, since more do not change the story."""
    micro_batches = min(recipe.accumulation, 2)
    return replace(
        recipe,
        batch_size=rows * micro_batches,
        accumulation=micro_batches,
        length=length if recipe.task == "text" else None,
    )


def _key(recipe: Recipe) -> Recipe:
    """The same for all recipes that share a surface."""
    return _resized(plan_key(recipe), *CHECK[recipe.micro_batch == 1])

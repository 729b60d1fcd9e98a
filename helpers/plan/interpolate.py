"""A plan for every batch size and length at once, for sliders and searches.

The same operations run whatever the shape; only sizes change. A storage of a transformer holds
(a + b * examples) * (1, length, length^2) elements. So six traces of small shapes give the size of
each storage as a polynomial, and a seventh trace, at another shape, checks all of them. The peak is
then found on the recomputed timeline, wherever it moves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from helpers.plan.planner import plan_key, trace_recipe
from helpers.recipe import Recipe
from tight_fit.checks import of_type
from tight_fit.memory.plan import Plan, to_plan

# Whether a micro-batch is a single example -> its sizes that are traced. A single example takes
# other operations (there is nothing to transpose), so it has an interpolation of its own.
EXAMPLES = {False: (2, 3), True: (1,)}
LENGTHS = (24, 40, 64)  # tokens
CHECK = {False: (5, 56), True: (1, 56)}  # (examples, tokens) of the trace that checks the others


class PlanInterpolation:
    """`PlanInterpolation(recipe, device).plan(recipe with another batch_size or length)`.

    Making one takes seven small traces; each plan then takes milliseconds. Raises RuntimeError if
    the sizes of the model's storages are no such polynomial.
    """

    def __init__(self, recipe: Recipe, device: str):
        self.recipe, self.device = recipe, device
        self.single = recipe.micro_batch == 1
        text = recipe.tokens is not None
        points = [
            (examples, length)
            for examples in EXAMPLES[self.single]
            for length in (LENGTHS if text else (None,))
        ]
        traces = [trace_recipe(_resized(recipe, *point), device)[0] for point in points]
        examples, length = CHECK[self.single]
        check = (examples, length if text else None)
        self.storage_trace, self.parameters = trace_recipe(_resized(recipe, *check), device)
        if any(trace.events != self.storage_trace.events for trace in traces):
            raise RuntimeError(
                "This model takes other operations at other shapes: plan each shape by itself."
            )
        basis = np.array([self._basis(*point) for point in points])
        sizes = np.array([trace.bytes for trace in traces], dtype=float)
        flops = np.array([list(trace.flops.values()) for trace in traces], dtype=float)
        self.sizes = np.linalg.solve(basis, sizes)
        self.flops = np.linalg.solve(basis, flops)
        if not (
            np.array_equal(self._evaluate(self.sizes, *check), self.storage_trace.bytes)
            and np.array_equal(
                self._evaluate(self.flops, *check), list(self.storage_trace.flops.values())
            )
        ):
            raise RuntimeError(
                "This model's sizes are no polynomial of examples and length: "
                "plan each shape by itself."
            )

    def _evaluate(self, coefficients: np.ndarray, examples: int, length: int | None) -> np.ndarray:
        """int64 [columns of the coefficients], the polynomials' values at a shape."""
        values = np.array(self._basis(examples, length)) @ coefficients
        return np.rint(values).astype(np.int64)

    def _basis(self, examples: int, length: int | None) -> list[float]:
        powers = (1, length, length**2) if length else (1,)
        factors = (1,) if self.single else (1, examples)
        return [factor * power for factor in factors for power in powers]

    def plan(self, recipe: Recipe) -> Plan:
        """The plan of a recipe that differs only in batch_size, length or accumulation.

        Raises ValueError for any other difference, and where one of the two recipes has a single
        example per micro-batch and the other has several.
        """
        if _key(recipe) != _key(self.recipe):
            raise ValueError(
                "This interpolation was made for a recipe that differs in more than batch size and "
                "length, or has one example per micro-batch where the other has several."
            )
        shape = recipe.micro_batch, recipe.tokens
        plan = to_plan(
            (self.storage_trace, self.parameters),
            recipe,
            self.device,
            self._evaluate(self.sizes, *shape),
        )
        repeats = recipe.accumulation / min(recipe.accumulation, 2)  # two micro-batches are traced
        flops = (int(value * repeats) for value in self._evaluate(self.flops, *shape))
        return replace(plan, flops=dict(zip(self.storage_trace.flops, flops)))


def interpolation(recipe: Recipe, device: str = "cuda") -> PlanInterpolation:
    """The interpolation that a recipe's plan lies on, made once and kept."""
    return _interpolation(_key(recipe), device)


def plan_at(plan: Plan, batch_size: int | None = None, length: int | None = None) -> Plan:
    """The plan of the same recipe with another batch size or length (tokens).

    The first call for a recipe makes its interpolation (seconds), each further one takes
    milliseconds. Raises TypeError for the plan of a step that is not a `Recipe`, ValueError for a
    shape that a recipe cannot have.
    """
    of_type("plan", plan, Plan)
    if not isinstance(plan.recipe, Recipe):
        raise TypeError("Only the plan of a Recipe is known at other shapes: plan the other step.")
    changed = plan.recipe
    if batch_size is not None:
        changed = replace(changed, batch_size=batch_size)
    if length is not None:
        changed = replace(changed, length=length)
    return interpolation(changed, plan.device).plan(changed)


@lru_cache(maxsize=32)
def _interpolation(recipe: Recipe, device: str) -> PlanInterpolation:
    return PlanInterpolation(recipe, device)


def _resized(recipe: Recipe, examples: int, length: int | None) -> Recipe:
    """The recipe with `examples` per micro-batch, in one or two micro-batches.

    More than two do not change the trace.
    """
    micro_batches = min(recipe.accumulation, 2)
    return replace(
        recipe,
        batch_size=examples * micro_batches,
        accumulation=micro_batches,
        length=length if recipe.tokens is not None else None,
    )


def _key(recipe: Recipe) -> Recipe:
    """The same for all recipes that share an interpolation."""
    return _resized(plan_key(recipe), *CHECK[recipe.micro_batch == 1])

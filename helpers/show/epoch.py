"""What an epoch costs by the way its batches are made: padding, FLOPs, and planned time per GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from helpers.data.batching import Batch, padded_length
from helpers.plan.planner import plan
from helpers.recipe import Recipe, replace
from helpers.strategy.show import SHOWN, settings
from helpers.tables import Table
from tight_fit.memory.plan import Plan
from tight_fit.units import duration, number

WIDTHS = 3  # padded lengths that are planned for each number of examples


def epochs(
    named: Mapping[str, tuple[Recipe, Sequence[Batch]]],
    lengths: Sequence[int],
    gpus: Sequence[str] = SHOWN,
) -> Table:
    """A row per way of making batches: padding, FLOPs, and the planned time of an epoch per GPU.

    named    {label: (a full-size recipe, the epoch's micro-batches as indices of examples)}. Each
             micro-batch is padded to its longest example, rounded up to a multiple of 8, or to the
             recipe's length where its padding is "fixed"
    lengths  tokens of each example
    gpus     names of `gpus.GPUS`

    A step is planned at three padded lengths for each number of examples, or for the smallest,
    the middle and the largest number where there are many. A parabola through the lengths, and
    straight lines between the numbers, give the rest. Behind a time stands what multiple it is of
    the first row's. Raises ValueError for no recipe, and where a micro-batch is longer than the
    recipe's length.
    """
    if not named:
        raise ValueError("There is nothing to show: give at least one recipe and its batches.")
    rows: list[dict[str, str]] = []
    first: dict[str, float] = {}
    for label, (recipe, batches) in named.items():
        shapes = _shapes(recipe, batches, lengths)
        tokens = sum(count * length for count, length in shapes)
        real = sum(lengths[example] for batch in batches for example in batch)
        flops = sum(cost_of_epoch(recipe, shapes, "flops"))
        row = {"batches": label, "padding": f"{1 - real / tokens:.0%}", "FLOPs": number(flops)}
        for gpu in gpus:
            seconds = sum(cost_of_epoch(recipe, shapes, gpu))
            times = seconds / first.setdefault(gpu, seconds)
            row[gpu] = duration(seconds) + (f" (× {times:.2f})" if rows else "")
        rows.append(row)
    return Table(
        rows,
        "Planned, nothing was run: one epoch, and how long it takes on each GPU, "
        f"{settings(recipe for recipe, _ in named.values())}.",
    )


def cost_of_epoch(recipe: Recipe, shapes: Sequence[tuple[int, int]], what: str) -> list[float]:
    """The FLOPs (what="flops"), or the seconds on a GPU, of each micro-batch.

    shapes  (examples, padded length in tokens) of each micro-batch
    The optimizer's step is shared out evenly over the recipe's micro-batches.
    """
    counts = sorted({count for count, _ in shapes})
    common = [count for count in counts if sum(c == count for c, _ in shapes) > len(shapes) / 2]
    grid = common or sorted({counts[0], counts[len(counts) // 2], counts[-1]})
    top = max(length for _, length in shapes)
    at = sorted({min(64, top), max(8, (64 + top) // 16 * 8), top})
    curves = []
    for count in grid:
        values = [_cost(_of_shape(recipe, count, length), what) for length in at]
        curves.append(np.polyfit(at, values, min(WIDTHS, len(at)) - 1))
    result = []
    for count, length in shapes:
        values = [float(np.polyval(curve, length)) for curve in curves]
        if len(grid) == 1:
            result.append(values[0] * (count / grid[0] if count < grid[0] else 1.0))
        else:
            result.append(float(np.interp(count, grid, values)))
    return result


def _shapes(
    recipe: Recipe, batches: Sequence[Batch], lengths: Sequence[int]
) -> list[tuple[int, int]]:
    """(examples, padded length) of each micro-batch."""
    limit = recipe.tokens
    if limit is None:
        raise ValueError("Images have no padding: give a recipe of a text model.")
    shapes = []
    for batch in batches:
        longest = max(lengths[example] for example in batch)
        if longest > limit:
            raise ValueError(
                f"A batch holds an example of {longest} tokens, more than the recipe's {limit}: "
                "truncate the lengths, or give the recipe a larger length."
            )
        padded = limit if recipe.padding == "fixed" else padded_length(longest, 8, limit)
        shapes.append((len(batch), padded))
    return shapes


def _of_shape(recipe: Recipe, count: int, length: int) -> Recipe:
    """The recipe with `count` examples per micro-batch, all of one padded length."""
    return replace(
        recipe,
        batch_size=count * recipe.accumulation,
        length=length,
        padding="fixed",
    )


def _cost(recipe: Recipe, what: str) -> float:
    """FLOPs or seconds of one micro-batch of the recipe."""
    planned = _planned(recipe)
    total = sum(planned.flops.values()) if what == "flops" else planned.seconds(what).total
    return total / recipe.accumulation


@lru_cache(maxsize=64)
def _planned(recipe: Recipe) -> Plan:
    return plan(recipe)

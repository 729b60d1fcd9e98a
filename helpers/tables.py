"""Runs and plans side by side, as a table that reads well as text and as HTML."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from helpers.batching import Batch, padded_length
from helpers.plan import plan
from helpers.recipe import Recipe, difference, replace
from helpers.record import Run
from tight_fit.checks import each_of_type, of_type
from tight_fit.kernels.kernel_time import constants
from tight_fit.kernels.trace_ops import TracedOps
from tight_fit.memory.plan import Plan
from tight_fit.optimizer_kinds import KINDS
from tight_fit.techniques.settings import StepSettings
from tight_fit.units import duration, number, size

# The 0.975 quantile of Student's t distribution for 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


# What many readers have: Colab's and Kaggle's GPU, one for games, and a data centre's.
SHOWN = ("T4", "RTX 3060", "A100-40GB")
# What a caption says of a step's precision and optimizer: they decide how long a step takes.
PRECISIONS = {
    "fp32": "fp32 without TF32",
    "tf32": "fp32 with TF32",
    "bf16": "bf16 autocast",
    "fp16": "fp16 autocast",
}
AS_MUCH = "bf16 takes as much"  # memory, and time within 3 %, where a GPU has it
KEPT_TABLES = Path(__file__).parent / "kept" / "tables.json"
WIDTHS = 3  # padded lengths that are planned for each number of examples


class Table:
    """Lines of text under named columns: HTML in a notebook, aligned text elsewhere.

    rows     one {column: text} per line; a column that a line lacks shows "n/a"
    caption  a sentence above the table
    """

    def __init__(self, rows: list[dict[str, str]], caption: str = ""):
        self.frame = pd.DataFrame(rows).fillna("n/a")
        self.caption = caption

    def __str__(self) -> str:
        text = "" if self.frame.empty else self.frame.to_string(index=False)
        return "\n".join(part for part in (self.caption, text) if part)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        caption = f"<p>{html.escape(self.caption, quote=False)}</p>" if self.caption else ""
        if self.frame.empty:
            return caption
        return caption + self.frame.to_html(index=False, border=0, justify="right")


def kept(name: str) -> dict[str, Any]:
    """{"rows", "caption"} of a table that `make plans` keeps. Raises KeyError for another name."""
    return _kept()[name]


@cache
def _kept() -> dict[str, dict[str, Any]]:
    return json.loads(KEPT_TABLES.read_text(encoding="utf8"))


def runs(named: Mapping[str, Run]) -> Table:
    """One line per run: planned and measured peak, median step, speed, last loss, accuracy.

    Runs of GPUs whose speed is known have the planned step as well. The caption names the machine
    of the first run. Raises TypeError for what is no dict of runs, ValueError for an empty one.
    """
    each_of_type("named", named, Run)
    rows = []
    timed = any(run.planned_seconds for run in named.values())
    for label, run in named.items():
        last = run.losses[-5:]
        random = "" if run.recipe.weights == "pretrained" else " (random weights)"
        rows.append(
            {
                "run": label,
                "planned peak": size(run.planned),
                "measured peak": size(run.peak),
                **({"planned step": duration(run.planned_seconds)} if timed else {}),
                "step": duration(run.step_seconds),
                "examples/s": f"{run.rows_per_second:.0f}",
                "last loss": f"{sum(last) / len(last):.3f}",
                "accuracy": f"{run.accuracy:.1%}{random}",
            }
        )
    first = next(iter(named.values()))
    machine = first.environment
    how = (
        "CUDA's allocated peak"
        if first.memory["allocated"]
        else "all tensors, counted while it ran"
    )
    return Table(rows, f"{machine['name']} ({machine['device']}), measured peak: {how}")


def before_after(before: Run, after: Run) -> Table:
    """The two runs of a comparison.

    Raises ValueError where their recipes differ in more, or less, than one field, TypeError for
    what is no run.
    """
    of_type("before", before, Run)
    of_type("after", after, Run)
    name, old, new = one_change(before, after)
    return runs({f"before: {name}={old}": before, f"after: {name}={new}": after})


def one_change(before: Run, after: Run) -> tuple[str, object, object]:
    """(field of the recipe, its value before, its value after). Raises ValueError for more fields,
    or none."""
    changed = difference(before.recipe, after.recipe)
    if len(changed) != 1:
        raise ValueError(
            "Before and after must differ in one field of the recipe, these differ in "
            f"{len(changed)}: {', '.join(changed) or 'none'}."
        )
    ((name, (old, new)),) = changed.items()
    return name, old, new


def plans(named: Mapping[str, Plan]) -> Table:
    """One line per plan: peak and its categories, FLOPs per step. The same on every machine.

    Raises TypeError for what is no dict of plans, ValueError for an empty one.
    """
    each_of_type("named", named, Plan)
    return Table(
        [
            {
                "plan": label,
                "peak": size(plan.peak),
                **{name: size(value) for name, value in plan.at_peak.items()},
                "FLOPs per step": number(sum(plan.flops.values())),
            }
            for label, plan in named.items()
        ]
    )


@dataclass(frozen=True)
class Paired:
    """Differences of two arms, seed by seed.

    mean  of the differences
    low, high  its 95 % interval by Student's t
    seeds  how many pairs there are
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def points(self) -> str:
        """Mean and interval in points of accuracy."""
        mean, low, high = (100 * value for value in (self.mean, self.low, self.high))
        return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def paired(differences: Iterable[float]) -> Paired:
    """The mean of paired differences and its 95 % interval. Raises ValueError for fewer than 2."""
    values = list(differences)
    if not 2 <= len(values) <= len(STUDENT) + 1:
        raise ValueError(
            f"{len(values)} paired differences give no interval: "
            f"give 2 to {len(STUDENT) + 1}, one per seed."
        )
    mean = statistics.mean(values)
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return Paired(mean, mean - half, mean + half, len(values))


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
        f"{settings(plan(recipe) for recipe, _ in named.values())}.",
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
        values = [_cost_of_step(_of_shape(recipe, count, length), what) for length in at]
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


def _cost_of_step(recipe: Recipe, what: str) -> float:
    """FLOPs or seconds of one micro-batch of the recipe."""
    planned = plan(recipe)
    total = sum(planned.flops.values()) if what == "flops" else planned.seconds(what).total
    return total / recipe.accumulation


def settings(plans: Iterable[Any]) -> str:
    """Precisions, optimizers and attention of some plans, as a sentence's end, each named once.

    fp16 alone is what a T4 computes in; readers of other GPUs take bf16, of which the same is true.
    """
    made = list(plans)
    used: list[StepSettings] = [planned.recipe for planned in made]
    precisions = dict.fromkeys(PRECISIONS[step.precision] for step in used)
    if PRECISIONS["bf16"] not in precisions:
        more = {PRECISIONS["fp16"]: f"{PRECISIONS['fp16']} ({AS_MUCH})"}
        precisions = dict.fromkeys(more.get(name, name) for name in precisions)
    optimizers = dict.fromkeys(KINDS[step.optimizer].label for step in used)
    attention = dict.fromkeys(
        "fused (sdpa)" if _is_fused(planned.operations) else "eager" for planned in made
    )
    return (
        f"in {' or '.join(precisions)}, with {' or '.join(optimizers)}, "
        f"{' or '.join(attention)} attention, not compiled"
    )


def _is_fused(operations: TracedOps) -> bool:
    return any(op.kind == "attention" for ops in operations.ops for op in ops)


def within() -> str:
    """A sentence on how far measured steps were from planned ones (docs/gpu-time.md)."""
    error = constants()["shared"]["error"]
    return f"Nine of ten times are within {max(error.values()):.0%}."

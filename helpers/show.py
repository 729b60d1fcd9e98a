"""What lessons show with one call: tables, with the sentence that reads them.

from helpers import show

show.before_and_after(before, after)  # two runs: memory, time, accuracy, and the record
show.plans({"before": before, "after": after})  # memory and seconds at full size, per GPU
show.phases({"before": before, "after": after}, "T4")  # where the time of a step goes
show.layouts(job, {"DDP": parse("ddp=4")}, cluster)  # memory, messages and seconds per GPU
show.moved({"offloaded": plan}, ["T4"])  # bytes on the GPU and on the host, and seconds
show.contexts()  # long texts, on one GPU each or over several
show.large("8B on 8")  # the best layouts of a job that was searched
show.owned()  # the best layout for GPUs that many readers have
show.rungs(), show.savings()  # the ladder of techniques, and what each is worth
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from helpers.batching import Batch, padded_length
from helpers.plan import plan
from helpers.plan_tables import (
    SHOWN,
    cell,
    contexts,
    large,
    layouts,
    owned,
    phases,
    plans,
    rungs,
    savings,
    settings,
    techniques,
    within,
)
from helpers.recipe import Recipe, replace
from helpers.record import Run, read
from helpers.tables import Table, one_change
from tight_fit.checks import each_of_type
from tight_fit.gpus import GPU, as_gpu
from tight_fit.memory.plan import Plan
from tight_fit.units import duration, number, size

__all__ = [
    "before_and_after",
    "contexts",
    "epochs",
    "large",
    "layouts",
    "moved",
    "owned",
    "phases",
    "plans",
    "rungs",
    "savings",
    "techniques",
]

WIDTHS = 3  # padded lengths that are planned for each number of examples


def before_and_after(before: Run, after: Run, more: dict[str, Run] | None = None) -> Table:
    """The two runs of a lesson, and what a GPU recorded of the same notebook, as one table.

    more  further runs by label, for a table of more than two
    The caption says in a sentence what the change did to memory, accuracy and, on a GPU, time.
    Times are shown only of a GPU: a CPU's depend on what else it does. Rows of a record appear only
    where `results/` has one.

    Raises ValueError where the recipes of before and after differ in more, or less, than one
    field, TypeError for what is no run.
    """
    each_of_type("runs", {"before": before, "after": after, **(more or {})}, Run)
    name, old, new = one_change(before, after)
    rows = [_row(f"before: {name}={old}", before), _row(f"after: {name}={new}", after)]
    rows += [_row(label, run) for label, run in (more or {}).items()]
    notebook = before.name.split("/", 1)[0]
    for label, run in read(notebook).items():
        rows.append(_row(f"recorded on {run.environment['name']}: {label}", run))
    if not any(row["time per step"] for row in rows):
        for row in rows:
            del row["time per step"]
    return Table(rows, _sentence(before, after))


def _row(label: str, run: Run) -> dict[str, str]:
    random = "" if run.recipe.weights == "pretrained" else " (random weights)"
    on_a_gpu = run.environment["device"] == "cuda"
    return {
        "run": label,
        "memory, planned": size(run.planned),
        "memory, measured": size(run.peak),
        "time per step": duration(run.step_seconds) if on_a_gpu else "",
        "accuracy": f"{run.accuracy:.1%}{random}",
    }


def _sentence(before: Run, after: Run) -> str:
    """What changed from the first run to the second, in words and numbers."""
    saved = 1 - after.peak / before.peak
    percent = f"{abs(saved):.0%}"
    memory = f"{percent} {'less' if saved > 0 else 'more'} memory than before"
    if percent == "0%":
        memory = "as much memory as before"
    if before.environment["device"] == "cuda":
        machine = f"the {before.environment['name']}"
        ratio = after.step_seconds / before.step_seconds
        time = f" and {ratio:.2f} times the time per step"
    else:
        machine, time = "this CPU", ""
    points = 100 * (after.accuracy - before.accuracy)
    test = f"{after.test_rows} test examples"
    return (
        f"On {machine}: after takes {memory}{time}. "
        f"Its accuracy on {test} differs by {points:+.1f} points, from one run each."
    )


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
    planned = _planned(recipe)
    total = sum(planned.flops.values()) if what == "flops" else planned.seconds(what).total
    return total / recipe.accumulation


@lru_cache(maxsize=64)
def _planned(recipe: Recipe) -> Plan:
    return plan(recipe)


def moved(named: Mapping[str, Plan], gpus: Sequence[str | GPU]) -> Table:
    """A row per plan: what it needs on the GPU and on the host, and the step's time on each GPU.

    named  {label: a plan for "cuda"}, each rung below the one it is compared with
    gpus   names of `gpus.GPUS`; "does not fit" stands where the GPU has too little memory

    What moves is timed with data sheets' rates of PCI Express and of the host's memory, which are
    not fitted (`kernels.host_memory`). Raises TypeError for what is no plan.
    """
    each_of_type("named", named, Plan)
    rows, before = [], None
    for label, planned in named.items():
        rows.append(
            {
                "planned": label,
                "on the GPU": size(planned.peak),
                "this rung": "" if before is None else _change(planned.peak - before),
                "on the host": size(planned.host) if planned.host else "nothing",
                **{gpu.name: cell(planned, gpu) for gpu in map(as_gpu, gpus)},
            }
        )
        before = planned.peak
    return Table(
        rows,
        f"Planned, not run, {settings(named.values())}. {within()} "
        "Copies to and from the host are timed by data sheets.",
    )


def _change(difference: int) -> str:
    return f"{'-' if difference < 0 else '+'}{size(abs(difference))}"

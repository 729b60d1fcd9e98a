"""Runs and plans side by side, as a table that reads well as text and as HTML."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from helpers.memory.timeline import Plan
from helpers.recipe import difference
from helpers.record import Run, missing, read
from helpers.units import duration, number, size


class Table:
    """Rows of text under named columns. Shows itself as HTML in a notebook and as aligned text elsewhere."""

    def __init__(self, rows: list[dict[str, str]], caption: str = ""):
        self.frame = pd.DataFrame(rows).fillna("n/a")
        self.caption = caption

    def __str__(self) -> str:
        return "\n".join(
            part
            for part in (
                self.caption,
                "" if self.frame.empty else self.frame.to_string(index=False),
            )
            if part
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        caption = f"<p>{self.caption}</p>" if self.caption else ""
        return caption + (
            "" if self.frame.empty else self.frame.to_html(index=False, border=0, justify="right")
        )

    def to_markdown(self) -> str:
        """As a GitHub table."""
        lines = [
            "| " + " | ".join(self.frame.columns) + " |",
            "|" + " --- |" * len(self.frame.columns),
        ]
        lines += [
            "| " + " | ".join(map(str, row)) + " |" for row in self.frame.itertuples(index=False)
        ]
        return "\n".join(lines)


def runs(found: Mapping[str, Run], caption: str = "") -> Table:
    """One row a run: planned and measured peak, median step, rows a second, accuracy. The caption names the machine."""
    rows = []
    for label, run in found.items():
        rows.append(
            {
                "run": label,
                "planned peak": size(run.planned),
                "measured peak": size(run.peak),
                "step": duration(run.step_seconds),
                "rows/s": f"{run.rows_per_second:.0f}",
                "last loss": f"{sum(run.losses[-5:]) / len(run.losses[-5:]):.3f}",
                "accuracy": f"{run.accuracy:.1%}"
                + ("" if run.recipe.weights == "pretrained" else " (random weights)"),
            }
        )
    first = next(iter(found.values()))
    if not caption:
        caption = f"{first.environment['name']} ({first.environment['device']}), {_measure(first)}"
    return Table(rows, caption)


def before_after(before: Run, after: Run) -> Table:
    """The two runs of a comparison. Raises ValueError when they differ in more, or less, than one field."""
    changed = difference(before.recipe, after.recipe)
    if len(changed) != 1:
        raise ValueError(
            f"Before and after must differ in one field of the recipe, these differ in {len(changed)}: "
            f"{', '.join(changed) or 'none'}."
        )
    ((name, (old, new)),) = changed.items()
    return runs({f"before: {name}={old}": before, f"after: {name}={new}": after})


def plans(found: Mapping[str, Plan]) -> Table:
    """One row a plan: peak and its categories, FLOPs a step. The same on every machine."""
    return Table(
        [
            {
                "plan": label,
                "peak": size(plan.peak),
                **{name: size(value) for name, value in plan.at_peak.items()},
                "FLOPs a step": number(sum(plan.flops.values())),
            }
            for label, plan in found.items()
        ]
    )


def record(notebook: str) -> Table:
    """The newest record of a notebook's runs; without one a table of no rows, whose caption says how to take one."""
    found = read(notebook)
    if not found:
        return Table([], missing(notebook))
    first = next(iter(found.values()))
    where = first.environment
    return runs(
        found,
        f"Recorded on {first.date[:10]}: {where['name']}, driver {where['driver']}, torch {where['torch']}, "
        f"transformers {where['transformers']}, {_measure(first)}",
    )


def _measure(run: Run) -> str:
    return (
        "measured peak: CUDA's allocated peak"
        if run.memory["allocated"]
        else "measured peak: tensors, by the tracker"
    )

"""Runs and plans side by side, as a table that reads well as text and as HTML."""

from __future__ import annotations

import html
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from helpers.recipe import difference
from helpers.record import Run
from tight_fit.checks import each_of_type, of_type
from tight_fit.memory.plan import Plan
from tight_fit.units import duration, number, size

# The 0.975 quantile of Student's t distribution for 1, 2, ... degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


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

    def to_markdown(self) -> str:
        """The lines, without the caption, as a table of GitHub's Markdown."""
        rows = [self.frame.columns, ["---"] * len(self.frame.columns)]
        rows += self.frame.itertuples(index=False)
        return "\n".join("| " + " | ".join(map(markdown, row)) + " |" for row in rows)


def markdown(value: object) -> str:
    """A value as the text of a cell in Markdown: no tag, no end of the cell or of the line."""
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", " ".join(str(value).split()))
    return re.sub(r"(?<!\\)\|", r"\|", text)


def runs(named: Mapping[str, Run], caption: str = "") -> Table:
    """One line per run: planned and measured peak, median step, speed, last loss, accuracy.

    Runs of GPUs whose speed is known have the planned step as well. The caption, unless it is
    given, names the machine of the first run. Raises TypeError for what is no dict of runs,
    ValueError for an empty one.
    """
    each_of_type("named", named, Run, least=0 if caption else 1)
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
    if not caption:
        first = next(iter(named.values()))
        machine = first.environment
        caption = f"{machine['name']} ({machine['device']}), {_measure(first)}"
    return Table(rows, caption)


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


def _measure(run: Run) -> str:
    how = (
        "CUDA's allocated peak" if run.memory["allocated"] else "all tensors, counted while it ran"
    )
    return f"measured peak: {how}"


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

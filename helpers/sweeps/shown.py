"""A kept sweep as a table and as a figure."""

from __future__ import annotations

import io
import statistics
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from helpers import plots, profile
from helpers.sweeps.results import MANY, Paired, Sweep, read
from helpers.tables import Table
from tight_fit.command.alt_text import DescribedFigure, closed

MARKERS = "os^Dv*PX"
DASHES = ("-", "--", "-.", ":")


class SweepFigure(DescribedFigure):
    """A figure whose text form is its description too."""

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        picture = io.BytesIO()
        self.savefig(picture, format="png", bbox_inches="tight")
        data: dict[str, Any] = {"image/png": picture.getvalue(), "text/plain": self.alt}
        return data, {"image/png": {"alt": self.alt}}


def table(name: str | Sweep) -> Table:
    """Each arm of a kept sweep at its own best learning rate.

    Accuracy is the mean over seeds, ± their standard deviation. The difference from the first arm
    is the mean of the differences seed by seed, with its 95 % interval by Student's t. "Twice the
    steps" is the change of accuracy after twice as many steps: near zero on a plateau.

    name  such as "03_freezing"
    Raises FileNotFoundError for a sweep that is not kept, ValueError for one that is not finished.
    """
    sweep = name if isinstance(name, Sweep) else read(name)
    _check(sweep)
    rows = [
        {"arm": label, "accuracy": f"{accuracy:.1%}", "best learning rate": "none"}
        for label, accuracy in sweep.references.items()
    ]
    for number, arm in enumerate(sweep.arms):
        scores = list(sweep.scores(arm.name).values())
        row = {
            "arm": arm.name,
            "best learning rate": f"{sweep.best(arm.name):.2g}",
            "accuracy": f"{statistics.mean(scores):.1%} ± {100 * statistics.stdev(scores):.1f}",
            "difference": _points(sweep.difference(arm.name)) if number else "first arm",
            "seeds": str(len(scores)),
        }
        if any(other.against for other in sweep.arms):
            row["from"] = sweep.other(arm.name) if number else "n/a"
        if len({sweep.steps(arm.name) for arm in sweep.arms}) > 1:
            row["steps"] = str(sweep.steps(arm.name))
        twice = sweep.gain_of_twice_the_steps(arm.name)
        if twice:
            row["twice the steps"] = _points(twice)
        rows.append(row)
    return Table(rows, caption(sweep))


def short(name: str | Sweep) -> Table:
    """Who wins, by how much and how sure, in a row per arm; `table` has the intervals.

    "sure" means that the 95 % interval of the difference, seed by seed, leaves zero out. Raises
    what `table` raises.
    """
    sweep = name if isinstance(name, Sweep) else read(name)
    _check(sweep)
    rows = [
        {"trained": label, "best learning rate": "none", "accuracy": f"{accuracy:.1%}"}
        for label, accuracy in sweep.references.items()
    ]
    seeds = 0
    for number, arm in enumerate(sweep.arms):
        scores = sweep.scores(arm.name).values()
        seeds = len(scores)
        row = {
            "trained": arm.name,
            "best learning rate": f"{sweep.best(arm.name):.2g}",
            "accuracy": f"{statistics.mean(scores):.1%}",
            "difference": "" if not number else _sure(sweep, arm.name),
        }
        if len({sweep.steps(arm.name) for arm in sweep.arms}) > 1:
            row["steps"] = str(sweep.steps(arm.name))
        rows.append(row)
    what = f"Run once and kept: {profile.describe(sweep.base)}, {seeds} seeds per row"
    return Table(rows, f"{what}, each row at its own best learning rate; differences in points.")


def _sure(sweep: Sweep, arm: str) -> str:
    """A difference in points, and whether its interval leaves zero out."""
    found = sweep.difference(arm)
    sure = "sure" if found.low > 0 or found.high < 0 else "not sure"
    other = sweep.other(arm)
    against = "" if other == sweep.arms[0].name else f" (from {other})"
    return f"{100 * found.mean:+.1f}, {sure}{against}"


def caption(sweep: Sweep) -> str:
    """What a sweep is: model, data, steps, seeds, device and date, in a few sentences."""
    recipe, machine = sweep.base, sweep.environment
    changed = {name for arm in sweep.arms for name in arm.fields}
    settings = {
        "batch_size": f"batches of {recipe.batch_size}",
        "steps": f"{recipe.steps} steps",
        "optimizer": recipe.optimizer,
    }
    shared = [text for field, text in settings.items() if field not in changed]
    same, count = "train_size" not in changed, recipe.train_size
    examples = f"{count} training, " if same and count is not None else ""
    others = ", all others for training" if same and count is None else ""
    where = "CPU" if machine["device"] == "cpu" else machine["name"]
    return (
        f"Sweep {sweep.name}, run once and kept: {profile.describe(recipe)}; "
        f"{', '.join([*shared, ''])}"
        f"{examples}{sweep.validation} validation and {recipe.test_size} test examples"
        f"{others}; {where}, torch {machine['torch']}, {sweep.runs[-1].date[:10]}. Each arm has "
        "the learning rate with the best mean accuracy on the validation examples. Accuracy is the "
        "mean on the test examples, ± the standard deviation over the seeds. Differences in points "
        "of accuracy on the test examples, seed by seed, with 95 % intervals (Student's t)."
        f"{' ' * bool(sweep.note)}{sweep.note}"
    )


def figure(name: str | Sweep) -> DescribedFigure:
    """Test accuracy against learning rate: a line per arm, its band from lowest to highest seed.

    A large marker is the learning rate that the validation examples chose. Points far below the
    best ones are cut off. Raises what `table` raises.
    """
    sweep = name if isinstance(name, Sweep) else read(name)
    _check(sweep)
    picture = plt.figure(figsize=(8.5, 3.8), FigureClass=SweepFigure)
    assert isinstance(picture, SweepFigure)
    axis = picture.add_subplot()
    near: list[float] = []
    for number, arm in enumerate(sweep.arms):
        colour = plots.LINES[number % len(plots.LINES)]
        rates, best = sweep.rates(arm.name), sweep.best(arm.name)
        scores = [[100 * run.accuracy for run in sweep.at(arm.name, r).values()] for r in rates]
        means = [statistics.mean(values) for values in scores]
        marker = MARKERS[number % len(MARKERS)]
        style = DASHES[number % len(DASHES)]
        axis.fill_between(
            rates,
            [min(v) for v in scores],
            [max(v) for v in scores],
            color=colour,
            alpha=0.13,
            lw=0,
        )
        axis.plot(rates, means, style, marker=marker, markersize=4, color=colour, label=arm.name)
        centre = rates.index(best)
        axis.plot(best, means[centre], marker, color=colour, markersize=11, markeredgecolor="black")
        near += means[centre - 1 : centre + 2]
    tried = sorted({rate for arm in sweep.arms for rate in sweep.rates(arm.name)})
    lowest = max(0.0, min(near) - 4)
    cut = axis.get_ylim()[0] < lowest
    if cut:
        axis.set_ylim(lowest, min(100.0, max(near) + 2))
    axis.set(xscale="log", xlabel="peak learning rate")
    axis.set_ylabel("test accuracy in %" + ("\n(lower points cut off)" if cut else ""))
    shown = tried[:: 1 + len(tried) // 8]
    axis.set_xticks(shown, [f"{rate:.2g}" for rate in shown])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    picture.alt = _alt(sweep)
    closed(picture)
    return picture


def _alt(sweep: Sweep) -> str:
    """The figure in words."""
    parts = []
    for arm in sweep.arms:
        scores = sweep.scores(arm.name).values()
        best = sweep.best(arm.name)
        parts.append(f"{arm.name} {statistics.mean(scores):.1%} at a learning rate of {best:.2g}")
    return (
        "Test accuracy against peak learning rate, one line per arm, which rises to a best rate "
        f"and falls after it. At their best rates: {'; '.join(parts)}."
    )


def _points(difference: Paired) -> str:
    """A paired difference in points of accuracy."""
    mean, low, high = (100 * value for value in (difference.mean, difference.low, difference.high))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _check(sweep: Sweep) -> None:
    unfinished = [arm.name for arm in sweep.arms if not sweep.finished(arm.name)]
    if unfinished:
        raise ValueError(
            f"Sweep {sweep.name} is not finished: {', '.join(unfinished)} lack {MANY} seeds at the "
            f"best learning rate and its neighbours; `make sweeps N={sweep.name[:2]}` goes on."
        )

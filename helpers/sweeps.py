"""Kept sweeps: techniques compared at tuned learning rates, as a table and as a figure.

A sweep compares arms: recipes that differ in a technique. Each arm has a learning rate of its own,
the one with the highest mean accuracy on validation examples, which neither train nor test. What
is reported is the accuracy on the test examples at that rate. `benchmarks.sweeps` runs sweeps,
keeps every run in results/sweeps/, and here what is shown of them.
"""

from __future__ import annotations

import io
import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from helpers import plots
from helpers.tables import Table
from tight_fit.command.alt_text import DescribedFigure, closed

MARKERS = "os^Dv*PX"
KEPT = Path(__file__).parent / "kept" / "sweeps.json"


@cache
def _kept() -> dict[str, dict[str, Any]]:
    return json.loads(KEPT.read_text(encoding="utf8"))


def table(name: str) -> Table:
    """Each arm of a kept sweep at its own best learning rate.

    Accuracy is the mean over seeds, ± their standard deviation. The difference from the first arm
    is the mean of the differences seed by seed, with its 95 % interval by Student's t. "Twice the
    steps" is the change of accuracy after twice as many steps: near zero on a plateau.

    name  such as "03_freezing"
    Raises KeyError for a sweep that is not kept.
    """
    return Table(**_kept()[name]["table"])


def short(name: str) -> Table:
    """Who wins, by how much and how sure, in a row per arm; `table` has the intervals.

    "sure" means that the 95 % interval of the difference, seed by seed, leaves zero out. Raises
    what `table` raises.
    """
    return Table(**_kept()[name]["short"])


def figure(name: str) -> DescribedFigure:
    """Test accuracy against learning rate: a line per arm, its band from lowest to highest seed.

    A large marker is the learning rate that the validation examples chose. Points far below the
    best ones are cut off. Raises what `table` raises.
    """
    kept = _kept()[name]
    picture = plt.figure(figsize=(8.5, 3.8), FigureClass=SweepFigure)
    assert isinstance(picture, SweepFigure)
    axis = picture.add_subplot()
    near: list[float] = []
    for number, curve in enumerate(kept["curves"]):
        colour = plots.LINES[number % len(plots.LINES)]
        rates, scores, best = curve["rates"], curve["scores"], curve["best"]
        means = [statistics.mean(values) for values in scores]
        marker = MARKERS[number % len(MARKERS)]
        style = plots.DASHES[number % len(plots.DASHES)]
        band: dict[str, Any] = {"color": colour, "alpha": 0.13, "linewidth": 0}
        axis.fill_between(rates, [*map(min, scores)], [*map(max, scores)], **band)
        axis.plot(
            rates, means, style, marker=marker, markersize=4, color=colour, label=curve["arm"]
        )
        centre = rates.index(best)
        axis.plot(best, means[centre], marker, color=colour, markersize=11, markeredgecolor="black")
        near += means[centre - 1 : centre + 2]
    tried = sorted({rate for curve in kept["curves"] for rate in curve["rates"]})
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
    picture.alt = kept["alt"]
    closed(picture)
    return picture


class SweepFigure(DescribedFigure):
    """A figure whose text form is its description too."""

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        picture = io.BytesIO()
        self.savefig(picture, format="png", bbox_inches="tight")
        data: dict[str, Any] = {"image/png": picture.getvalue(), "text/plain": self.alt}
        return data, {"image/png": {"alt": self.alt}}

"""The course's figures, each from plans or runs. All return a matplotlib Figure, already closed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from helpers.memory.figures import categories, timeline
from helpers.record import Run
from tight_fit.checks import series, whole
from tight_fit.command.alt_text import DescribedFigure, closed, described
from tight_fit.command.told_apart import COLOURS

__all__ = ["COLOURS", "LINES", "bars", "categories", "described", "losses", "style", "timeline"]

LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")  # beside colours
STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.autolayout": True,
}


def style() -> None:
    """Set the course's defaults for matplotlib."""
    plt.rcParams.update(STYLE)


def losses(named: Mapping[str, Run | list[float]], smooth: int = 5) -> Figure:
    """Loss over optimizer steps: each run as a thin line, and its mean over `smooth` steps.

    Raises TypeError for what is no dict of runs or lists of numbers, ValueError for an empty one.
    """
    series("named", named, Run, list, tuple, np.ndarray)
    whole("smooth", smooth, 1)
    figure, axis = plt.subplots(figsize=(7, 3.4), FigureClass=DescribedFigure)
    said = []
    for colour, style, (label, run) in zip(LINES, cycle(DASHES), named.items()):
        values = np.array(run.losses if isinstance(run, Run) else run)
        steps = np.arange(1, len(values) + 1)
        axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        window = min(smooth, len(values))
        mean = np.convolve(values, np.ones(window) / window, "valid")
        axis.plot(steps[window - 1 :], mean, color=colour, linestyle=style, label=label)
        said.append(f"{label}: from {mean[0]:.3g} to {mean[-1]:.3g} in {len(values)} steps.")
    axis.set(xlabel="optimizer step", ylabel="loss", ylim=(0, None))
    axis.legend(title=f"thick: mean of {smooth} steps", title_fontsize=8)
    return closed(figure, f"Loss over optimizer steps, means of {smooth}. {' '.join(said)}")


def bars(values: Mapping[str, float | list[float]], label: str, percent: bool = False) -> Figure:
    """One bar per name; of a list of values (seeds) their mean, with every value as a dot.

    Raises TypeError for what is no dict of numbers or lists of them, ValueError for an empty one.
    """
    series("values", values, int, float, list, tuple, np.generic, np.ndarray, finite=True)
    figure, axis = plt.subplots(figsize=(7, 0.9 + 0.45 * len(values)), FigureClass=DescribedFigure)
    said = []
    for row, (name, value) in enumerate(values.items()):
        several = np.atleast_1d(value) * (100 if percent else 1)
        axis.barh(name, several.mean(), color=LINES[row % len(LINES)], height=0.6)
        said.append(f"{name} {several.mean():.3g}")
        if len(several) > 1:
            axis.plot(several, [row] * len(several), "o", color="black", markersize=3)
        end, side = (several.max(), "left") if several.mean() >= 0 else (several.min(), "right")
        axis.text(end, row, f"  {several.mean():.3g}  ", va="center", ha=side, fontsize=9)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel=label)
    axis.margins(x=0.12)
    return closed(figure, f"Bars, {label}: {', '.join(said)}.")

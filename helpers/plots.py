"""The course's figures, each made from plans or runs. All return a matplotlib Figure and leave nothing open."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from helpers.memory.timeline import Plan
from helpers.memory.tracker import CATEGORIES, PHASES
from helpers.record import Run
from helpers.units import GIB, MIB

# Colours that stay apart for most readers with a colour vision deficiency (Okabe and Ito 2008).
COLOURS = dict(zip(CATEGORIES, ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999")))
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
POINTS = 1500  # a timeline is thinned to about this many moments; every peak stays


def style() -> None:
    """The course's defaults for matplotlib."""
    plt.rcParams.update(
        {
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
    )


def timeline(plans: Plan | Mapping[str, Plan], capacity: int | None = None) -> Figure:
    """Bytes alive over one optimizer step, stacked by category; several plans side by side on one scale.

    capacity  bytes of a card, drawn as a line
    """
    plans = {"": plans} if isinstance(plans, Plan) else dict(plans)
    top = max(plan.peak for plan in plans.values())
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    figure, axes = plt.subplots(
        1, len(plans), figsize=(3 + 4 * len(plans), 3.6), sharey=True, squeeze=False
    )
    for axis, (label, plan) in zip(axes[0], plans.items()):
        moments = _thinned(plan)
        axis.stackplot(
            moments,
            plan.timeline[moments].T / unit,
            labels=CATEGORIES,
            linewidth=0,
            colors=[COLOURS[category] for category in CATEGORIES],
        )
        _mark_phases(axis, plan)
        axis.plot(plan.peak_index, plan.peak / unit, "kv", markersize=5)
        axis.annotate(
            f"{plan.peak / unit:.2f} {name}",
            (plan.peak_index, plan.peak / unit),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
        if capacity:
            axis.axhline(capacity / unit, color="black", linestyle="--", linewidth=1)
        axis.set(
            title=label,
            xlabel="one optimizer step, event by event",
            xticks=[],
            xlim=(0, len(plan.phases)),
            ylim=(0, max(top, capacity or 0) / unit * 1.15),
        )
    axes[0][0].set_ylabel(name)
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    return _closed(figure)


def _thinned(plan: Plan) -> np.ndarray:
    every = max(1, len(plan.phases) // POINTS)
    starts = np.flatnonzero(np.diff(plan.phases)) + 1
    return np.unique(
        np.concatenate(
            [np.arange(0, len(plan.phases), every), [plan.peak_index, len(plan.phases) - 1], starts]
        )
    )


def _mark_phases(axis, plan: Plan) -> None:
    starts = [0, *(np.flatnonzero(np.diff(plan.phases)) + 1), len(plan.phases)]
    for begin, end in zip(starts, starts[1:]):
        axis.axvline(begin, color="white", linewidth=0.8)
        if end - begin > 0.12 * len(plan.phases):
            axis.text(
                (begin + end) / 2,
                0.01,
                PHASES[plan.phases[begin]],
                transform=axis.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=8,
                color="white",
            )


def categories(plans: Mapping[str, Plan], gpu: str | None = None) -> Figure:
    """A horizontal bar a plan: the bytes at its peak, by category; with `card`, what it has as a line."""
    from helpers.gpus import find

    limit = find(gpu).memory if gpu else 0
    top = max(max(plan.peak for plan in plans.values()), limit)
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    figure, axis = plt.subplots(figsize=(8.5, 0.9 + 0.42 * len(plans)))
    left = np.zeros(len(plans))
    for category in CATEGORIES:
        values = np.array([plan.at_peak[category] / unit for plan in plans.values()])
        axis.barh(
            list(plans), values, left=left, color=COLOURS[category], label=category, height=0.65
        )
        left += values
    for row, total in enumerate(left):
        axis.text(
            total,
            row,
            f" {total:.2f}",
            va="center",
            fontsize=9,
            zorder=3,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )
    if gpu:
        axis.axvline(
            limit / unit,
            color="black",
            linestyle="--",
            linewidth=1,
            label=f"{gpu}: {limit / unit:.1f} {name}",
        )
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel=f"{name} at the peak", xlim=(0, top / unit * 1.12))
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return _closed(figure)


def losses(found: Mapping[str, Run | list[float]], smooth: int = 5) -> Figure:
    """Loss curves over optimizer steps: each run thin as it was, and its running mean over `smooth` steps."""
    figure, axis = plt.subplots(figsize=(7, 3.4))
    for colour, (label, run) in zip(LINES, found.items()):
        values = np.array(run.losses if isinstance(run, Run) else run)
        steps = np.arange(1, len(values) + 1)
        axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        window = min(smooth, len(values))
        mean = np.convolve(values, np.ones(window) / window, "valid")
        axis.plot(steps[window - 1 :], mean, color=colour, label=label)
    axis.set(xlabel="optimizer step", ylabel="loss", ylim=(0, None))
    axis.legend()
    return _closed(figure)


def bars(values: Mapping[str, float | list[float]], label: str, percent: bool = False) -> Figure:
    """A bar a name; a list of values (seeds) is drawn as their mean with every value as a dot."""
    figure, axis = plt.subplots(figsize=(7, 0.9 + 0.45 * len(values)))
    scale = 100 if percent else 1
    for row, (name, value) in enumerate(values.items()):
        several = np.atleast_1d(value) * scale
        axis.barh(name, several.mean(), color=LINES[row % len(LINES)], height=0.6)
        if len(several) > 1:
            axis.plot(several, [row] * len(several), "o", color="black", markersize=3)
        end, side = (several.max(), "left") if several.mean() >= 0 else (several.min(), "right")
        axis.text(end, row, f"  {several.mean():.3g}  ", va="center", ha=side, fontsize=9)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel=label)
    axis.margins(x=0.12)
    return _closed(figure)


def _closed(figure: Figure) -> Figure:
    plt.close(
        figure
    )  # so that a notebook shows it once, as the cell's value, and keeps no reference
    return figure

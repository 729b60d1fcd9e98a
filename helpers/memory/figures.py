"""Figures of plans: bytes over one step, and bytes at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.gpus import find
from helpers.memory.timeline import Plan
from helpers.memory.tracker import CATEGORIES, PHASES
from helpers.units import GIB, MIB

# Colours that most readers with a colour vision deficiency tell apart (Okabe and Ito 2008).
COLOURS = dict(zip(CATEGORIES, ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999")))
POINTS = 1500  # a timeline is thinned to about this many points; every peak stays


def timeline(plans: Plan | Mapping[str, Plan], capacity: int | None = None) -> Figure:
    """Bytes alive over one optimizer step, stacked by category; several plans on one scale.

    capacity  of a GPU in bytes, drawn as a line
    """
    named = {"": plans} if isinstance(plans, Plan) else dict(plans)
    top = max(plan.peak for plan in named.values())
    unit, name = _unit(top)
    size = 3 + 4 * len(named), 3.6
    figure, axes = plt.subplots(1, len(named), figsize=size, sharey=True, squeeze=False)
    for axis, (label, plan) in zip(axes[0], named.items()):
        starts = [0, *(np.flatnonzero(np.diff(plan.phases)) + 1), len(plan.phases)]
        points = _thinned(plan, starts)
        colours = [COLOURS[category] for category in CATEGORIES]
        stack = plan.timeline[points].T / unit
        axis.stackplot(points, stack, labels=CATEGORIES, linewidth=0, colors=colours)
        _mark_phases(axis, plan, starts)
        peak = plan.peak_index, plan.peak / unit
        axis.plot(*peak, "kv", markersize=5)
        above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 9}
        axis.annotate(f"{peak[1]:.2f} {name}", peak, **above)
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
    return closed(figure)


def _unit(most: int) -> tuple[int, str]:
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")


def _thinned(plan: Plan, starts: Sequence[int]) -> np.ndarray:
    """Indices of the events to draw: about POINTS, and the peak and the starts of phases."""
    count = len(plan.phases)
    even = np.arange(0, count, max(1, count // POINTS))
    return np.unique(np.concatenate([even, [plan.peak_index, count - 1], starts[1:-1]]).astype(int))


def _mark_phases(axis: Axes, plan: Plan, starts: Sequence[int]) -> None:
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
    """One horizontal bar per plan: the bytes at its peak, by category.

    gpu  name of a GPU, whose memory is drawn as a line. Raises ValueError for an unknown one
    """
    limit = find(gpu).memory if gpu else 0
    top = max(max(plan.peak for plan in plans.values()), limit)
    unit, name = _unit(top)
    figure, axis = plt.subplots(figsize=(8.5, 0.9 + 0.42 * len(plans)))
    left = np.zeros(len(plans))
    for category in CATEGORIES:
        values = np.array([plan.at_peak[category] / unit for plan in plans.values()])
        colour = COLOURS[category]
        axis.barh(list(plans), values, left=left, color=colour, label=category, height=0.65)
        left += values
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    for row, total in enumerate(left):
        axis.text(total, row, f" {total:.2f}", va="center", fontsize=9, zorder=3, bbox=box)
    if gpu:
        label = f"{gpu}: {limit / unit:.1f} {name}"
        axis.axvline(limit / unit, color="black", linestyle="--", linewidth=1, label=label)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel=f"{name} at the peak", xlim=(0, top / unit * 1.12))
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return closed(figure)


def closed(figure: Figure) -> Figure:
    """Closed, so that a notebook shows it once, as the cell's value, and keeps no reference."""
    plt.close(figure)
    return figure

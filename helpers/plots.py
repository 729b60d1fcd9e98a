"""The course's figures, from plans or runs, and its drawings of ideas, which are SVG files.

Figures are of matplotlib, already closed. Drawings are those of notebooks/drawings, each with a
title and a description. A colour always means the same thing, in curves of memory as well (blue
parameters, vermilion gradients, green optimizer states, yellow activations), and never stands
alone: each kind of box also has its own outline or hatching, for prints in grey and readers who see
colours otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.record import Run
from tight_fit.checks import each_of_type, series, whole
from tight_fit.command.alt_text import DescribedFigure, closed
from tight_fit.command.alt_text import described as described
from tight_fit.command.told_apart import COLOURS, EDGE, HATCHES
from tight_fit.gpus import as_gpu
from tight_fit.memory.plan import Plan
from tight_fit.trace.storage_trace import CATEGORIES, PHASES
from tight_fit.units import GIB, MIB
from tight_fit.units import size as size_of

DRAWINGS = Path(__file__).parents[1] / "notebooks" / "drawings"
WORDS = ("title", "desc")  # of an SVG file, for those who cannot see it
SVG = "{http://www.w3.org/2000/svg}"
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
# What a GPU needs beside tensors (`Fit.terms`), as a figure names it.
OVERHEAD = "context, workspace,\nallocator, margin"
POINTS = 1500  # a timeline is thinned to about this many points; every peak stays


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


def timeline(plans: Plan | Mapping[str, Plan], capacity: int | None = None) -> Figure:
    """Bytes alive over one optimizer step, stacked by category; several plans on one scale.

    capacity  of a GPU in bytes, drawn as a line
    """
    named = {"": plans} if isinstance(plans, Plan) else plans
    each_of_type("plans", named, Plan)
    if capacity is not None:
        whole("capacity", capacity, 1, 2**50)
    top = max(plan.peak for plan in named.values())
    unit, name = _unit(top)
    size = 3 + 4 * len(named), 3.6
    shared: dict[str, Any] = {"sharey": True, "squeeze": False, "FigureClass": DescribedFigure}
    figure, axes = plt.subplots(1, len(named), figsize=size, **shared)
    for axis, (label, plan) in zip(axes[0], named.items()):
        starts = [0, *(np.flatnonzero(np.diff(plan.phases)) + 1), len(plan.phases)]
        points = _thinned(plan, starts)
        colours = [COLOURS[category] for category in CATEGORIES]
        stack = plan.timeline[points].T / unit
        areas = axis.stackplot(points, stack, labels=CATEGORIES, colors=colours)
        for area, category in zip(areas, CATEGORIES):
            area.set(hatch=HATCHES[category], edgecolor=EDGE, linewidth=0.3)
        _mark_phases(axis, plan, starts)
        peak = plan.peak_index, plan.peak / unit
        axis.plot(*peak, "kv", markersize=5)
        above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 9}
        axis.annotate(f"{peak[1]:.2f} {name}", peak, **above)
        if capacity:
            axis.axhline(capacity / unit, color="black", linestyle="--", linewidth=1)
            axis.text(
                0.99,
                capacity / unit,
                f"memory of the GPU: {capacity / unit:.1f} {name}",
                transform=axis.get_yaxis_transform(),
                ha="right",
                va="bottom",
                fontsize=8,
            )
        axis.set(
            title=label,
            xlabel="one optimizer step, event by event",
            xticks=[],
            xlim=(0, len(plan.phases)),
            ylim=(0, max(top, capacity or 0) / unit * 1.15),
        )
    axes[0][0].set_ylabel(name)
    axes[0][-1].legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    limit = f" The GPU has {size_of(capacity)}." if capacity else ""
    return closed(
        figure, f"Bytes alive over one optimizer step, by category. {_said(named)}{limit}"
    )


def _said(named: Mapping[str, Plan]) -> str:
    """The peak of each plan and what is in it, in words."""
    sentences = []
    for label, plan in named.items():
        parts = ", ".join(f"{name} {size_of(count)}" for name, count in plan.at_peak.items())
        where = f"{label}: peak" if label else "Peak"
        phase = f" in the {plan.peak_phase} phase" if isinstance(plan, Plan) else ""
        sentences.append(f"{where} of {size_of(plan.peak)}{phase}: {parts}.")
    return " ".join(sentences)


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

    gpu  name of a GPU, whose memory is drawn as a line. The bar then ends with what the GPU needs
         beside tensors (CUDA context, workspace, allocator, margin), so that a bar that crosses
         the line does not fit. Raises ValueError for an unknown one
    """
    each_of_type("plans", plans, Plan)
    limit = as_gpu(gpu).memory if gpu is not None else 0
    beside = [plan.fits(gpu).need - plan.peak if gpu else 0 for plan in plans.values()]
    needs = [plan.peak + more for plan, more in zip(plans.values(), beside)]
    top = max(*needs, limit)
    unit, name = _unit(top)
    # Never lower than its legend.
    size = (8.5, max(0.9 + 0.42 * len(plans), 2.0))
    figure, axis = plt.subplots(figsize=size, FigureClass=DescribedFigure)
    left = np.zeros(len(plans))
    for category in CATEGORIES:
        values = np.array([plan.at_peak[category] / unit for plan in plans.values()])
        look: dict[str, Any] = {"color": COLOURS[category], "hatch": HATCHES[category]}
        look |= {"edgecolor": EDGE, "linewidth": 0.4, "label": category}
        axis.barh(list(plans), values, left=left, height=0.65, **look)
        left += values
    if gpu:
        widths = [more / unit for more in beside]
        style: dict[str, Any] = {
            "color": "white",
            "edgecolor": "#777777",
            "hatch": "////",
            "linewidth": 0.5,
        }
        axis.barh(list(plans), widths, left=left, height=0.65, label=OVERHEAD, **style)
        left += widths
    for row, total in enumerate(left):
        axis.text(total, row, f" {total:.2f}", va="center", fontsize=9, zorder=3)
    if gpu:
        label = f"{gpu}: {limit / unit:.1f} {name}"
        axis.axvline(limit / unit, color="black", linestyle="--", linewidth=1, label=label)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel=f"{name} at the peak", xlim=(0, top / unit * 1.12))
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    verdicts = " ".join(
        f"{label or 'The step'}: {plan.fits(gpu)}." for label, plan in plans.items() if gpu
    )
    return closed(figure, f"Bytes at the peak, by category. {_said(plans)} {verdicts}".strip())


@dataclass(frozen=True)
class Drawing:
    """A picture that a notebook shows, with words for those who cannot see it.

    svg    the file's text
    title  what it is a drawing of, from its <title>
    alt    what is to be seen, whole sentences, from its <desc>
    """

    svg: str
    title: str
    alt: str

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        data = {"image/svg+xml": self.svg, "text/plain": f"<schematic: {self.alt}>"}
        return data, {"image/svg+xml": {"alt": self.alt}}


def drawing(name: str) -> Drawing:
    """The drawing `name`, as the last line of a cell: drawing("02_micro_batches").

    Raises FileNotFoundError for a name that no file in notebooks/drawings has.
    """
    svg = (DRAWINGS / f"{name}.svg").read_text(encoding="utf8")
    picture = ElementTree.fromstring(svg)
    title, alt = (" ".join(picture.findtext(f"{SVG}{part}", "").split()) for part in WORDS)
    return Drawing(svg, title, alt)

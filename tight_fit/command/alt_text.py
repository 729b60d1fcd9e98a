"""Figures with words and numbers for those who cannot see them.

Notebooks keep these as the alternative text of the picture, and the site and the pages show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PolyCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, ScalarFormatter

from tight_fit.command.told_apart import told_apart

FEW = 6  # points of a curve that are all named
MANY = 12  # curves and bars of one pair of axes; of more only those with a name are told


class DescribedFigure(Figure):
    """A matplotlib figure with a text for those who cannot see it.

    alt  the text; notebooks and their pages carry it with the picture
    """

    alt = ""

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, "Figure")

    def _repr_mimebundle_(self, include=None, exclude=None) -> tuple[dict, dict]:
        """Only the metadata: Jupyter draws the picture as that of any figure."""
        return {}, {"image/png": {"alt": self.alt}} if self.alt else {}


def closed(figure: Figure, alt: str = "") -> Figure:
    """Closed, so that a notebook shows it once, as the cell's value, and keeps no reference.

    alt  its alternative text, kept where it is a `DescribedFigure`
    """
    if isinstance(figure, DescribedFigure) and alt:
        figure.alt = alt
    plt.close(figure)
    return figure


def described(figure: Figure, words: str) -> Figure:
    """The same figure, closed, with an alternative text: the last line of a cell that draws.

    What only its colour tells apart gets a dash, a marker or a hatch as well (`told_apart`).

    words  one or two sentences: what is drawn, and what is to be seen in it. The numbers of curves,
           bars and areas are added by `numbers`

    Raises TypeError for what is no figure, ValueError for words that are no sentence.
    """
    if not isinstance(figure, Figure):
        raise TypeError(f"described needs a matplotlib figure, not {type(figure).__name__}.")
    if len(words.split()) < 4 or not words.rstrip().endswith("."):
        raise ValueError(f"Say in a whole sentence what the figure shows, not {words!r}.")
    if type(figure) is Figure:
        figure.__class__ = DescribedFigure  # as plt.subplots(FigureClass=DescribedFigure) makes it
    told_apart(figure)
    return closed(figure, f"{words} {numbers(figure)}".strip())


def numbers(figure: Figure) -> str:
    """What curves, bars and areas of a figure show, in words: one sentence per pair of axes.

    A curve of at most FEW points is told point by point, a longer one by its ends and extremes.
    Dots without a name, pictures and histograms are left to the words of `described`.
    """
    sentences = []
    for axis in figure.axes:
        found = [*_bars(axis), *_curves(axis), *_areas(axis)]
        told = [name + words for name, words in found if name or len(found) <= MANY][:MANY]
        if told:
            named = [axis.get_title() or axis.get_title("left"), axis.get_ylabel()]
            up = ", ".join(" ".join(name.split()) for name in named if name)
            across = " ".join(axis.get_xlabel().split())
            head = f"{up} over {across}" if up and across else up or across or "Values"
            sentences.append(f"{head}: {'; '.join(told)}.")
    return " ".join(sentences)


def _bars(axis: Axes) -> Iterator[tuple[str, str]]:
    for container in axis.containers:
        if not isinstance(container, BarContainer):
            continue
        flat = container.orientation == "horizontal"
        along = axis.yaxis if flat else axis.xaxis
        places = [
            bar.get_y() + bar.get_height() / 2 if flat else bar.get_x() + bar.get_width() / 2
            for bar in container.patches
        ]
        values: Any = container.datavalues
        yield _series(container.get_label(), places, values, along)


def _curves(axis: Axes) -> Iterator[tuple[str, str]]:
    names = {
        part.lines[0]: part.get_label()
        for part in axis.containers
        if isinstance(part, ErrorbarContainer)
    }
    for line in axis.lines:
        label = str(names.get(line, line.get_label()))
        x, y = (np.asarray(data, float) for data in line.get_data(orig=False))
        if _spans(line, axis):
            if not label.startswith("_"):
                yield f"{label} ", _number(y[0] if y[0] == y[-1] else x[0])
        elif not label.startswith("_") or line.get_linestyle() not in ("None", "", " "):
            kept = np.isfinite(y)
            yield _series(label, x[kept], y[kept], axis.xaxis, axis.yaxis)


def _spans(line: Line2D, axis: Axes) -> bool:
    """Whether it is a line across the whole axes: axhline, axvline."""
    across = axis.get_yaxis_transform(which="grid"), axis.get_xaxis_transform(which="grid")
    return any(line.get_transform() is each for each in across)  # == compares their numbers


def _areas(axis: Axes) -> Iterator[tuple[str, str]]:
    """Of an area between two curves its height."""
    for area in axis.collections:
        if isinstance(area, PolyCollection) and area.get_paths():
            corners = np.asarray(area.get_paths()[0].vertices)
            count = (len(corners) - 3) // 2
            there, back = corners[1 : count + 1], corners[count + 2 : 2 * count + 2][::-1]
            if count > 0 and np.array_equal(there[:, 0], back[:, 0]):  # no hexagon or violin
                heights = np.abs(there[:, 1] - back[:, 1])
                yield _series(str(area.get_label()), there[:, 0], heights, axis.xaxis)


def _series(
    label: Any,
    places: Sequence[float] | np.ndarray,
    values: Sequence[float] | np.ndarray,
    along: Axis,
    up: Axis | None = None,
) -> tuple[str, str]:
    """("name: ", "3 at 1, 4 at 2"); the ends and the extremes of many. A hidden name is empty."""
    head = "" if str(label).startswith("_") else f"{label}: "
    if not len(values):
        return head, "nothing"
    of_places, of_values = _ticks(along), _ticks(up) if up is not None else {}

    def named(value: float, names: dict[float, str]) -> str:
        return names.get(round(float(value), 6)) or _number(value)

    def at(index: int) -> str:
        return f"{named(values[index], of_values)} at {named(places[index], of_places)}"

    if len(values) <= FEW:
        return head, ", ".join(map(at, range(len(values))))
    low, high = int(np.argmin(values)), int(np.argmax(values))
    inside = [
        f"{word} {at(index)}"
        for word, index in (("lowest", low), ("highest", high))
        if index not in (0, len(values) - 1)
    ]
    return head, ", ".join([f"from {at(0)}", f"to {at(len(values) - 1)}", *inside])


def _ticks(axis: Axis) -> dict[float, str]:
    """{place: name} of the ticks that have names instead of numbers."""
    if isinstance(axis.get_major_formatter(), (LogFormatter, ScalarFormatter)):
        return {}
    names = (" ".join(text.get_text().split()) for text in axis.get_ticklabels())
    return {round(float(tick), 6): name for tick, name in zip(axis.get_ticklocs(), names)}


def _number(value: float) -> str:
    """Three digits, without a power of ten where a reader can do without one."""
    value = float(value) + 0.0  # no minus before a zero
    size = abs(value)
    if not np.isfinite(size):
        return str(value)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 or value == int(value) else f"{value:.3g}"

"""Curves, bars and areas that more than their colour tells apart, as a print in one grey needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tight_fit.trace.storage_trace import CATEGORIES

# Colours that most readers with a colour vision deficiency tell apart (Okabe and Ito 2008).
COLOURS = dict(zip(CATEGORIES, ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999")))
# Beside colours, so that a print in one grey tells the categories apart.
HATCHES = dict(zip(CATEGORIES, ("", "////", "--", "", "....")))
EDGE = "#3A3A3A"  # of areas and hatches: 3:1 against white and against every colour of an area
PATTERNS = ("", "////", "....", "--", r"\\\\", "xx", "||", "oo", "++")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (2, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
NO_LINE = ("None", "none", "", " ")


def told_apart(figure: Figure) -> None:
    """Give what has a name, and differs by its colour only, a dash, a marker or a hatch of its own.

    What has no name gets the look of what has its colour. Legends show it as well.
    """
    looks, handles = _of_curves(figure), list(_handles(figure))
    lines = [line for axis in figure.axes for line in axis.lines]
    for line in [*lines, *(handle for handle in handles if isinstance(handle, Line2D))]:
        if (look := looks.get(_look(line))) is not None:
            line.set(**look)
    hatches = _of_areas(figure)
    filled = [part for _, parts in _areas(figure) for part in parts]
    filled += [handle for handle in handles if hasattr(handle, "get_facecolor")]
    for part in filled:
        hatch = hatches.get(_colour(part))
        if hatch is not None and not part.get_hatch():
            part.set(hatch=hatch, edgecolor=EDGE, linewidth=0.4)


def _look(line: Line2D) -> tuple[str, ...]:
    """Colour, and what tells a curve apart beside it: line, marker and a clearly other width."""
    parts = line.get_linestyle(), line.get_marker(), round(line.get_linewidth() / 2)
    return to_hex(line.get_color()), *map(str, parts)


def _of_curves(figure: Figure) -> dict[tuple[str, ...], dict[str, Any]]:
    """{look of a curve: what to set}, for curves with names that only their colour tells apart."""
    named = [line for axis in figure.axes for line in axis.lines if _has_name(line)]
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for look in dict.fromkeys(map(_look, named)):
        groups.setdefault(look[1:], []).append(look)
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for (style, marker, _), group in groups.items():
        if len(group) < 2:
            continue
        dots = style in NO_LINE
        others = {key[1 if dots else 0] for key in groups if key[:2] != (style, marker)}
        own = marker if dots else style
        free = [
            own,
            *(each for each in (MARKERS if dots else DASHES) if each not in {*others, own}),
        ]
        for look, each in zip(group, _long_enough(free, group)):
            found[look] = {"marker" if dots else "linestyle": each}
    return found


def _of_areas(figure: Figure) -> dict[str, str]:
    """{colour: hatch} of bars and areas with names; empty where there is one colour."""
    colours: dict[str, str] = {}
    for artist, parts in _areas(figure):
        if _has_name(artist):
            colours.setdefault(_colour(parts[0]), str(artist.get_label()))
    colours.pop("", None)
    if len(colours) < 2:
        return {}
    found = {colour: HATCHES[name] for colour, name in colours.items() if name in HATCHES}
    others = [colour for colour in colours if colour not in found]
    free = [pattern for pattern in PATTERNS if pattern not in found.values()]
    return found | dict(zip(others, _long_enough(free, others)))


def _colour(part: Any) -> str:
    """Of what is filled; empty for what is not."""
    faces = np.atleast_2d(part.get_facecolor())  # lines of a collection, as vlines makes, have none
    return to_hex(faces[0]) if faces.size and faces[0][3] else ""


def _areas(figure: Figure) -> Iterator[tuple[Any, Sequence[Any]]]:
    """(what has the name, its parts) of bars and of areas."""
    for axis in figure.axes:
        for container in axis.containers:
            if isinstance(container, BarContainer) and container.patches:
                yield container, container.patches
        for area in axis.collections:
            if isinstance(area, PolyCollection) and np.shape(area.get_facecolor())[:1] == (1,):
                yield area, [area]


def _handles(figure: Figure) -> Iterator[Artist]:
    legends = [axis.get_legend() for axis in figure.axes]
    for legend in [*legends, *figure.legends]:
        if legend is not None:
            yield from filter(None, legend.legend_handles)


def _has_name(artist: Any) -> bool:
    label = str(artist.get_label())
    return bool(label) and label != "None" and not label.startswith("_")


def _long_enough(choices: Sequence[Any], needed: Iterable[Any]) -> list[Any]:
    """The choices, again from the first where there are too few."""
    return [choices[place % len(choices)] for place, _ in enumerate(needed)]

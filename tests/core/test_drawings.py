"""Every drawing of every lesson is described, and keeps its words on its canvas, side by side."""

import re
from itertools import combinations
from xml.etree import ElementTree

import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from helpers.plots import DRAWINGS, SVG, drawing
from tools.course.notebooks import every_notebook

NAMES = sorted(path.stem for path in DRAWINGS.glob("*.svg"))
ENDS = {"start": 0, "middle": 0.5, "end": 1}  # the part of a text that lies left of its x


def test_every_drawing_is_shown_by_its_lesson_and_none_is_missing():
    places = {}
    for path in every_notebook():
        for cell in nbformat.read(path, as_version=4).cells:
            for name in re.findall(r'^drawing\("(\w+)"\)$', cell.source, re.MULTILINE):
                places.setdefault(name, []).append(path.stem)
    assert NAMES and sorted(places) == NAMES
    assert [name for name in NAMES if not any(p.startswith(name[:3]) for p in places[name])] == []


def lines(picture):
    """(left, right, top, bottom, words) of each line of text, in DejaVu Sans and pixels."""
    for group in picture.iter(f"{SVG}g"):
        for text in group.findall(f"{SVG}text"):
            size = float(text.get("font-size") or group.get("font-size"))
            font = FontProperties(family="DejaVu Sans", weight=text.get("font-weight", "normal"))
            for line in text.findall(f"{SVG}tspan") or [text]:
                box = TextPath((0, 0), line.text, size=size, prop=font).get_extents()
                left = float(line.get("x")) - ENDS[text.get("text-anchor", "start")] * box.width
                low = float(line.get("y"))
                yield left, left + box.width, low - box.y1, low - box.y0, line.text


def faults(picture):
    """What is wrong with the places of the words of a drawing."""
    _, _, width, height = map(float, picture.get("viewBox").split())
    found = list(lines(picture))
    for left, right, top, low, words in found:
        if left < -1 or top < -1 or right > width + 1 or low > height + 1:
            yield f"{words} lies outside"
    for one, other in combinations(found, 2):
        across = min(one[1], other[1]) - max(one[0], other[0])
        along = min(one[3], other[3]) - max(one[2], other[2])
        if across > 2 and along > 2:
            yield f"{one[4]} covers {other[4]}"


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_described_and_keeps_inside_its_canvas(name):
    one = drawing(name)
    assert len(one.title.split()) >= 3 and not one.title.endswith(".")
    assert len(one.alt.split()) >= 10 and one.alt.endswith(".")
    _, metadata = DisplayFormatter().format(one)
    assert metadata["image/svg+xml"]["alt"] == one.alt
    picture = ElementTree.fromstring(one.svg)
    assert list(faults(picture)) == []
    ids = {part.get("id") for part in picture.iter()} - {None}
    assert {*re.findall(r"url\(#([^)]*)\)", one.svg)} <= ids
    assert {*picture.get("aria-labelledby").split()} <= ids
    # White space between the lines of a text would be shown as a space.
    assert not re.search(r"\s<tspan|</tspan>\s", one.svg)

"""Schematics: every drawing of every lesson is made, described, and keeps inside its canvas."""

import importlib
import inspect
import pkgutil

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from helpers import schematics
from helpers.schematics.drawing import KINDS, Drawing

MODULES = [
    importlib.import_module(f"{schematics.__name__}.{module.name}")
    for module in pkgutil.iter_modules(schematics.__path__)
    if module.name != "drawing"
]
DRAWINGS = [
    pytest.param(function, id=f"{module.__name__.rpartition('.')[2]}.{name}")
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__ and not name.startswith("_")
]


def test_every_lesson_module_has_a_drawing():
    for module in MODULES:
        assert any(module.__name__ == case.values[0].__module__ for case in DRAWINGS), module


@pytest.mark.parametrize("function", DRAWINGS)
def test_a_drawing_is_described_and_keeps_inside_its_canvas(function):
    """Text and boxes lie on the canvas, and no text of one drawing covers another."""
    drawing = function()
    assert isinstance(drawing, Drawing)
    assert len(drawing.alt.split()) >= 10 and drawing.alt.rstrip().endswith(".")
    renderer = FigureCanvasAgg(drawing.figure).get_renderer()
    whole = drawing.figure.bbox
    texts = [text for text in drawing.axis.texts if isinstance(text, Text) and text.get_text()]
    boxes = [text.get_window_extent(renderer) for text in texts]
    for text, box in zip(texts, boxes):
        assert whole.x0 - 1 <= box.x0 and box.x1 <= whole.x1 + 1, text.get_text()
        assert whole.y0 - 1 <= box.y0 and box.y1 <= whole.y1 + 1, text.get_text()
    for index, one in enumerate(boxes):
        for other, text in zip(boxes[index + 1 :], texts[index + 1 :]):
            across = min(one.x1, other.x1) - max(one.x0, other.x0)
            along = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert across <= 2 or along <= 2, (texts[index].get_text(), text.get_text())


def test_a_picture_carries_its_description():
    drawing = Drawing(10, 5, "Two boxes with an arrow between them, for a test of drawings.")
    drawing.row(1, 1, 2, 1, ["a", "b"], ["kept", "dropped"], gap=1)
    drawing.arrow((1, 1), (4, 1), "to")
    data, metadata = drawing._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
    assert data["text/plain"] == f"<schematic: {drawing.alt}>"
    assert metadata["image/png"]["alt"] == drawing.alt


def test_a_drawing_needs_a_description():
    with pytest.raises(ValueError, match="give alt a sentence"):
        Drawing(10, 5, " ")


def test_an_unknown_kind_is_refused_with_the_kinds():
    with pytest.raises(ValueError, match="kind='blue' is no kind of box: use one of plain, kept"):
        Drawing(10, 5, "A drawing.").box(0, 0, 1, 1, kind="blue")


def test_no_two_kinds_look_alike_without_colour():
    """Kinds of one drawing that differ in colour alone would be lost in print."""
    ranks = [KINDS[f"rank {number}"] for number in range(4)]
    assert len({kind.hatch for kind in ranks}) == 4

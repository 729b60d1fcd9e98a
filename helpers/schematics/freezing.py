"""Schematics of lesson 03: frozen layers, trained layers, and where the backward pass stops."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

NAMES = ("embeddings", "layer 1", "layer 2", "layer 3", "layer 4", "head")
LEFT, STEP, WIDTH = 17.0, 13.8, 12.0


def where_backward_stops() -> Drawing:
    """The same six parts twice: frozen from the bottom, and with the lowest part still trained."""
    alt = (
        "Two rows of six parts, embeddings to head. Above, embeddings and layers 1 and 2 are "
        "frozen: the backward pass stops at layer 3, and only what lies above keeps activations. "
        "Below, the embeddings train: the backward pass goes through all frozen layers to them."
    )
    drawing = Drawing(100, 55, alt)
    _network(drawing, 34, "frozen from\nthe bottom", ["frozen"] * 3 + ["trained"] * 3, 3)
    _network(drawing, 8, "a trained part\nbelow frozen", _gap(), 0)
    words = {
        "frozen": "frozen",
        "trained": "trained",
        "kept": "activations kept",
        "dropped": "nothing kept",
    }
    drawing.legend(LEFT, 1, words, 20)
    return drawing


def _gap() -> list[str]:
    return ["trained"] + ["frozen"] * 2 + ["trained"] * 3


def _network(drawing: Drawing, y: float, title: str, kinds: list[str], lowest: int) -> None:
    """One row of parts; the backward pass goes down to the part of index `lowest`."""
    drawing.text(1, y + 10.5, title, align="left", bold=True)
    drawing.row(LEFT, y + 7, WIDTH, 7, NAMES, kinds, gap=STEP - WIDTH, size=8.5)
    end = LEFT + len(NAMES) * STEP
    drawing.arrow((LEFT, y + 18), (end, y + 18), "forward pass: through everything")
    for index in range(len(NAMES)):
        kept = index >= lowest
        kind = "kept" if kept else "dropped"
        text = "activations" if kept else "none"
        drawing.box(LEFT + index * STEP, y + 2.5, WIDTH, 3.5, text, kind, size=7.5)
    stop = LEFT + lowest * STEP
    label = "backward: stops at layer 3" if lowest else "backward: through everything"
    drawing.arrow((end, y), (stop, y), label, colour="#D55E00")

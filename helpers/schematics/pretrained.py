"""Schematic of lesson 01: what is copied from pretrained weights, and what starts at random."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

PARTS = ("patches", "layer 1", "layer 2", "...", "layer 12")


def two_starts() -> Drawing:
    """The same model from random weights, and from a pretrained body with a new head."""
    alt = (
        "Three rows. A file holds the body of a pretrained model and its old head. Below, the same "
        "model twice: in the first, the body is copied from the file and only the head, which "
        "names your classes, is random; in the second, body and head start from random numbers."
    )
    drawing = Drawing(100, 44, alt)
    rows = (
        (33, "the file", "trained", "old head", "dropped"),
        (19, "pretrained start", "trained", "new head", "waiting"),
        (6, "random start", "waiting", "new head", "waiting"),
    )
    for y, title, body, head, kind in rows:
        drawing.text(1, y + 3.5, title, align="left", bold=True, size=10)
        drawing.row(22, y, 11, 7, PARTS, body, gap=1, size=8.5)
        drawing.box(83, y, 14, 7, head, kind, size=8.5)
    drawing.arrow((51.5, 33), (51.5, 26), "copy, name by name")
    words = {"trained": "pretrained numbers", "waiting": "random numbers", "dropped": "not used"}
    drawing.legend(22, 0.8, words, 25)
    return drawing

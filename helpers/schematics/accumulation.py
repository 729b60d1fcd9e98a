"""Schematics of lesson 02: one batch in micro-batches."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing


def micro_batches() -> Drawing:
    """One batch of eight examples at once, and as two micro-batches of four."""
    alt = (
        "Left: eight examples go through the model together, so the activations of all eight are "
        "in memory. Right: four examples go forward and backward, their activations are freed, "
        "then the other four follow. Both gradients are added up before one optimizer step."
    )
    drawing = Drawing(100, 50, alt)
    drawing.text(21, 47, "one batch of 8", size=11, bold=True)
    drawing.row(3, 37, 4, 5, [str(i) for i in range(1, 9)], gap=0.6)
    drawing.arrow((21, 37), (21, 32.5))
    drawing.box(3, 21, 36.2, 11, "activations of 8 examples", "kept")
    drawing.arrow((21, 21), (21, 16.5), "backward")
    drawing.box(9, 10.5, 24, 6, "gradient of 8", "gradient")
    drawing.arrow((21, 10.5), (21, 6.5))
    drawing.box(9, 1, 24, 5.5, "optimizer step")

    drawing.text(73, 47, "the same batch as 2 micro-batches of 4", size=11, bold=True)
    for left, first, name in ((52, 1, "first"), (76, 5, "then")):
        drawing.row(left + 1, 37, 4, 5, [str(first + i) for i in range(4)], gap=0.6)
        middle = left + 10
        drawing.arrow((middle, 37), (middle, 32.5), name)
        drawing.box(left + 1, 26.5, 17.8, 6, "activations of 4", "kept")
    drawing.arrow((62, 26.5), (62, 16.5), "backward, then free")
    drawing.arrow((86, 26.5), (86, 16.5), "backward: adds")
    drawing.box(52.5, 10.5, 43, 6, "gradient: sum of both micro-batches", "gradient")
    drawing.arrow((74, 10.5), (74, 6.5))
    drawing.box(62, 1, 24, 5.5, "one optimizer step")
    drawing.arrow((33.5, 13.5), (52, 13.5), "the same", dashed=True)
    return drawing

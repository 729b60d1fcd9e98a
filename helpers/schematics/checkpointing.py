"""Schematics of lesson 06: what gradient checkpointing keeps, drops and computes again."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

LAYERS = 4


def kept_and_dropped() -> Drawing:
    """Four layers after the forward pass, without and with checkpoints, and in the backward
    pass."""
    alt = (
        "Four rows of four layers each. Without checkpointing, every layer's input and inside are "
        "kept after the forward pass. With it, only the inputs are kept. In the backward pass the "
        "inside of layer 4 is computed again, used and dropped, then that of layer 3."
    )
    drawing = Drawing(100, 58, alt)
    for index in range(LAYERS):
        drawing.text(35 + 18.5 * index, 55.5, f"layer {index + 1}", size=10, bold=True)
    drawing.text(1, 47, "without:\nafter the\nforward pass", align="left")
    _layers(drawing, 43, ["kept"] * 4, ["kept"] * 4)
    drawing.text(1, 34.5, "with checkpointing:\nafter the\nforward pass", align="left")
    _layers(drawing, 30.5, ["kept"] * 4, ["dropped"] * 4)
    drawing.text(1, 22, "backward pass\nat layer 4", align="left")
    _layers(drawing, 18, ["kept"] * 4, ["dropped"] * 3 + ["again"])
    drawing.text(1, 9.5, "backward pass\nat layer 3", align="left")
    _layers(drawing, 5.5, ["kept"] * 3 + ["dropped"], ["dropped"] * 2 + ["again", "dropped"])
    words = {"kept": "in memory", "dropped": "not in memory", "again": "computed a second time"}
    drawing.legend(27, 0.8, words, 22)
    return drawing


def _layers(drawing: Drawing, y: float, inputs: list[str], insides: list[str]) -> None:
    """One row: the input and the inside of each layer, as boxes of the given kinds."""
    for index, (first, second) in enumerate(zip(inputs, insides, strict=True)):
        left = 27 + 18.5 * index
        drawing.box(left, y, 4.5, 8, "in", first, size=8)
        drawing.box(left + 5, y, 11.5, 8, "inside", second, size=8)

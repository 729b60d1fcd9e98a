"""Schematic of lesson 17: how far each layer moves, without and with a trust ratio."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

LAYERS = {"layer 1": 30.0, "layer 2": 12.0, "layer 3": 4.0}  # lengths of the weights
STEP, SHARE = 2.4, 0.2  # length of AdamW's update; share of the weights with a trust ratio


def relative_steps() -> Drawing:
    """Three layers, the length of their weights, and the length of one update."""
    alt = (
        "Three layers whose weights have different lengths. Left, AdamW: all updates are equally "
        "long, so the largest weights change by 8 percent and the smallest by 60 percent. Right, "
        "LAMB: each update is scaled by a trust ratio, so every layer changes by 20 percent."
    )
    drawing = Drawing(100, 42, alt)
    for left, name in ((14, "AdamW: equally long updates"), (65, "LAMB: the same share for each")):
        drawing.text(left + 15, 39, name, size=10.5, bold=True)
        for index, (layer, length) in enumerate(LAYERS.items()):
            y = 30 - 10 * index
            step = STEP if left == 14 else SHARE * length
            drawing.text(left - 1.5, y + 2.5, layer, align="right", size=8.5)
            drawing.box(left, y, length, 3.6, kind="trained")
            drawing.box(left, y - 3.2, step, 2.6, kind="gradient")
            words = f"changes by {step / length:.0%}"
            drawing.text(left + step + 1.5, y - 1.9, words, align="left", size=8.5)
    legend = {"trained": "length of the weights", "gradient": "length of one update"}
    drawing.legend(22, 0.8, legend, 32)
    return drawing

"""Schematics of lesson 23: activations that wait on the host, and gradients that are forgotten."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

LEFT, STEP, WIDTH = 26.0, 9.0, 8.2


def round_trip() -> Drawing:
    """Four layers forward and backward on the GPU, and the copies beside them."""
    alt = (
        "Three rows over time. The GPU computes layers 1 to 4 forward and 4 to 1 backward without "
        "a pause. While it computes the next layer, the activations of the layer before are copied "
        "to the host; in the backward pass the activations of the next layer are fetched ahead."
    )
    drawing = Drawing(100, 42, alt)
    rows = {"GPU computes": 31, "activations to the host": 20, "activations back": 9}
    for title, y in rows.items():
        drawing.text(1, y + 3, title, align="left", bold=True)
    for index in range(4):
        x = LEFT + index * STEP
        drawing.box(x, rows["GPU computes"], WIDTH, 6, f"layer {index + 1}", "plain")
        if index < 3:
            drawing.box(
                x + STEP,
                rows["activations to the host"],
                WIDTH,
                6,
                f"of layer {index + 1}",
                "kept",
                8,
            )
    for index in range(4):
        x, layer = LEFT + (4 + index) * STEP, 4 - index
        drawing.box(x, rows["GPU computes"], WIDTH, 6, f"layer {layer}", "gradient")
        if index < 3:
            y = rows["activations back"]
            drawing.box(x, y, WIDTH, 6, f"of layer {layer - 1}", "kept", 8)
            drawing.arrow((x + WIDTH, y + 6), (x + STEP + 1.5, rows["GPU computes"]))
    drawing.text(LEFT + 2 * STEP, 39.5, "forward pass")
    drawing.text(LEFT + 6 * STEP, 39.5, "backward pass")
    drawing.arrow((LEFT, 4), (LEFT + 8 * STEP, 4), "time")
    return drawing


def gradients_forgotten() -> Drawing:
    """The gradients at the end of a backward pass, and with the optimizer inside of it."""
    alt = (
        "Left: after the backward pass the gradients of all four layers are in memory, then one "
        "optimizer step uses them. Right: as soon as the gradient of layer 2 is there, layer 2 is "
        "updated and the gradient is freed; those of layers 4 and 3 are gone already."
    )
    drawing = Drawing(100, 34, alt)
    for left, title in ((3, "optimizer after the backward pass"), (54, "in the backward pass")):
        drawing.text(left + 21, 31, title, bold=True)
        for index in range(4):
            drawing.box(left + index * 10.5, 20, 9.5, 6, f"layer {index + 1}", "trained")
    for index in range(4):
        drawing.box(3 + index * 10.5, 11, 9.5, 6, "gradient", "gradient")
        gone = index > 1
        if index:
            kind, word = ("dropped", "freed") if gone else ("gradient", "gradient")
            drawing.box(54 + index * 10.5, 11, 9.5, 6, word, kind)
    drawing.arrow((24, 11), (24, 7.5))
    drawing.box(10, 1, 28, 6, "one step for all four")
    drawing.arrow((69.3, 11), (69.3, 7.5))
    drawing.box(56, 1, 27, 6, "update layer 2, free")
    return drawing

"""Schematic of lesson 00: which kind of memory is alive in which part of a training step."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

PHASES = ("forward pass", "backward pass", "optimizer.step()", "zero_grad()")
LEFT, WIDTH = 25.0, 18.0


def lifetimes() -> Drawing:
    """Four kinds of memory as bars over the four parts of a training step."""
    alt = (
        "A table of bars. Columns are forward pass, backward pass, optimizer step and zero_grad. "
        "Parameters and optimizer states are in memory all the time. Activations grow in the "
        "forward pass and shrink in the backward pass. Gradients come in the backward pass and "
        "stay until zero_grad."
    )
    drawing = Drawing(100, 46, alt)
    for index, name in enumerate(PHASES):
        left = LEFT + index * WIDTH
        drawing.text(left + WIDTH / 2, 43, name, bold=True, size=9.5)
        drawing.axis.plot([left, left], [2, 41], color="#BBBBBB", linewidth=0.8, zorder=1)
    rows = (
        ("parameters", "the model", 0, 4, "always there", "trained"),
        (
            "optimizer states",
            "AdamW: two per parameter",
            0,
            4,
            "there since the first step",
            "state",
        ),
        ("activations", "results kept for backward", 0, 2, "grow, then shrink", "kept"),
        ("gradients", "one per parameter", 1, 3, "grow, then wait", "gradient"),
    )
    for index, (name, what, start, end, text, kind) in enumerate(rows):
        y = 32.5 - 10 * index
        drawing.text(1, y + 4.6, name, align="left", bold=True)
        drawing.text(1, y + 1.4, what, align="left", size=8)
        drawing.box(LEFT + start * WIDTH, y, (end - start) * WIDTH, 6.5, text, kind)
    return drawing

"""Schematics of lesson 21: weights in four bits, and adapters beside them."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

# NF4's levels, rounded
LEVELS = (
    *(-1.0, -0.70, -0.53, -0.39, -0.28, -0.18, -0.09, 0.0),
    *(0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0),
)


def four_bits() -> Drawing:
    """A block of weights becomes one scale and a level number per weight."""
    alt = (
        "A block of 64 weights in 16 bits becomes one scale and 64 numbers of four bits. Below, a "
        "line from minus one to one carries the sixteen levels of NF4, which lie closer together "
        "around zero. A weight divided by the scale is moved to its nearest level, and only the "
        "number of that level is stored."
    )
    drawing = Drawing(100, 50, alt)
    drawing.text(1, 46.5, "a block of 64 weights", size=11, bold=True, align="left")
    drawing.row(1, 37, 7.4, 6, ["0.12", "-0.50", "0.05", "0.31", "..."], "frozen")
    drawing.text(19.5, 34, "64 × 16 bits", size=9)
    drawing.arrow((40, 40), (54, 40), "quantize")
    drawing.box(55, 37, 9, 6, "0.50", "state")
    drawing.text(59.5, 34, "scale: largest\nabsolute value", size=9)
    drawing.row(67, 37, 6, 6, ["10", "0", "8", "13", "..."], "kept")
    drawing.text(82, 34, "64 × 4 bits: indices of levels", size=9)

    drawing.text(1, 26, "the sixteen levels of NF4", size=11, bold=True, align="left")
    left, right = 6.0, 94.0
    drawing.axis.plot([left, right], [15, 15], color="#444444", linewidth=1.2)
    for number, level in enumerate(LEVELS):
        x = left + (level + 1) / 2 * (right - left)
        drawing.axis.plot([x, x], [13.6, 16.4], color="#0072B2", linewidth=2)
        drawing.text(x, 11.4 if number % 2 else 18.8, str(number), size=8.5)
    for level, word in ((-1.0, "-1"), (0.0, "0"), (1.0, "1")):
        drawing.text(left + (level + 1) / 2 * (right - left), 8.2, word, size=9, bold=True)
    drawing.text(
        50,
        3.5,
        "0.12 / 0.50 = 0.24 is nearest to level 10, which stands for 0.246: "
        "the weight becomes 0.246 × 0.50 = 0.123",
        size=9,
    )
    return drawing


def layer() -> Drawing:
    """One linear layer of QLoRA in a step: what is stored in which dtype, and what trains."""
    alt = (
        "A linear layer of QLoRA. The frozen weight lies in memory in four bits. For each product "
        "it is written out in 16 bits, used, and dropped. Beside it the adapters A and B are kept "
        "in 32 bits and trained, with gradients and optimizer states of their own. The two results "
        "are added."
    )
    drawing = Drawing(100, 48, alt)
    drawing.box(46, 1, 10, 5, "x")
    drawing.arrow((49, 6), (31, 12))
    drawing.arrow((53, 6), (69, 12))
    drawing.box(1, 22, 17, 8, "W in 4 bits\nfrozen", "frozen")
    drawing.arrow((18, 26), (23, 26))
    drawing.box(23, 12, 16, 24, "W in bf16,\nwritten out for\nthis product,\nthen dropped", "again")
    drawing.box(62, 12, 14, 5, "A", "trained")
    drawing.arrow((69, 17), (69, 23))
    drawing.box(62, 23, 14, 5, "B", "trained")
    drawing.arrow((69, 28), (56, 39))
    drawing.arrow((31, 36), (46, 39))
    drawing.box(46, 38, 10, 5, "add")
    drawing.box(81, 12, 17, 7, "gradients\nof A and B", "gradient")
    drawing.box(81, 21, 17, 7, "AdamW's states\nof A and B", "state")
    words = {"frozen": "frozen", "again": "for a moment", "trained": "trained"}
    drawing.legend(1, 1, words, 15)
    return drawing

"""Schematics of lesson 07: a frozen matrix with two thin ones beside it."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing


def adapter() -> Drawing:
    """The way of x through W and through A and B, and the shapes of the matrices."""
    alt = (
        "Left: the input x goes through the frozen matrix W, and beside it through the trained "
        "matrices A and B; the two results are added. Right: W has 768 times 768 numbers. B has "
        "768 rows and 8 columns, A has 8 rows and 768 columns, and their product is as large as W."
    )
    drawing = Drawing(100, 50, alt)
    drawing.text(20, 47.5, "what the layer computes", size=11, bold=True)
    drawing.box(15, 1, 10, 5, "x")
    drawing.arrow((18, 6), (9, 12))
    drawing.arrow((22, 6), (31, 12))
    drawing.box(1, 12, 16, 17, "W\nfrozen", "frozen")
    drawing.box(24, 12, 14, 5, "A", "trained")
    drawing.arrow((31, 17), (31, 24), "8 numbers")
    drawing.box(24, 24, 14, 5, "B", "trained")
    drawing.arrow((31, 29), (22.5, 36.5), "times α / r")
    drawing.arrow((9, 29), (17.5, 36.5))
    drawing.box(15, 36.5, 10, 4.5, "add")
    drawing.arrow((20, 41), (20, 45))
    drawing.text(24, 43, "h", size=10)

    drawing.text(74, 47.5, "how large the matrices are (rank r = 8)", size=11, bold=True)
    drawing.box(46, 15, 22, 26, "W\n768 x 768\n589,824 numbers", "frozen")
    drawing.text(70.5, 28, "+", size=16)
    drawing.box(73, 15, 2.2, 26, "", "trained")
    drawing.box(76.5, 38.4, 22, 2.6, "", "trained")
    drawing.box(76.5, 15, 22, 22, "B A\nis as large as W,\nbut never stored", "dropped")
    drawing.text(74, 11.5, "B\n768 x 8\n6,144", size=9)
    drawing.text(87.5, 43.2, "A: 8 x 768, 6,144 numbers", size=9)
    words = {"frozen": "does not change", "trained": "trained"}
    drawing.legend(46, 1, words, 22)
    return drawing

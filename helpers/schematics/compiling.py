"""Schematics of lesson 22: what torch.compile fuses, and where it cuts the graph."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing


def fused() -> Drawing:
    """Four operations one by one, and as one kernel, with what each reads and writes."""
    alt = (
        "Two rows. Without compiling, four kernels follow one another, and each reads its inputs "
        "from memory and writes its result to memory. Compiled, one kernel reads the input once "
        "and writes the last result once."
    )
    drawing = Drawing(100, 46, alt)
    drawing.text(1, 40, "without:\nfour kernels", align="left")
    drawing.text(1, 14, "compiled:\none kernel", align="left")
    for index, name in enumerate(("x · x", "x³", "tanh", "multiply")):
        left = 20 + 20 * index
        drawing.box(left, 36, 13, 8, name)
        drawing.box(left, 25, 13, 6, "memory", "kept", size=8)
        for x in (left + 2.5, left + 5.5)[: 2 if index % 2 else 1]:  # x³ and multiply read two
            drawing.arrow((x, 31), (x, 36))
        drawing.arrow((left + 9.5, 36), (left + 9.5, 31))
    drawing.box(20, 10, 73, 8, "x · x   →   x³   →   tanh   →   multiply   (in registers)")
    drawing.box(20, 1, 13, 6, "memory", "kept", size=8)
    drawing.box(80, 1, 13, 6, "memory", "kept", size=8)
    drawing.arrow((26.5, 7), (26.5, 10))
    drawing.arrow((86.5, 10), (86.5, 7))
    return drawing


def cut() -> Drawing:
    """Forward and backward pass as one graph, cut where the least has to be kept."""
    alt = (
        "A chain from the input x by a product y, to its normalized form and to its activation, "
        "and the backward pass below. Without compiling, all three results are kept. Compiled, "
        "only y is kept, and the two others are computed a second time in the backward pass."
    )
    drawing = Drawing(100, 50, alt)
    names = ("y = x W", "norm(y)", "silu(norm(y))")
    for row, (label, kinds, again) in enumerate(
        (
            ("without", ("kept", "kept", "kept"), False),
            ("compiled", ("kept", "dropped", "dropped"), True),
        )
    ):
        y = 38 - 23 * row
        drawing.text(1, y + 3.5, f"{label}:\nforward pass", align="left")
        drawing.row(20, y, 20, 7, names, kinds, gap=7)
        drawing.arrow((40, y + 3.5), (47, y + 3.5))
        drawing.arrow((67, y + 3.5), (74, y + 3.5))
        below = y - 11
        drawing.text(1, below + 3.5, "backward pass", align="left")
        for column, name in enumerate(names):
            kind = "again" if again and column else "plain"
            text = f"{name} again" if again and column else "its gradient"
            drawing.box(20 + 27 * column, below, 20, 7, text, kind, size=8)
            if kinds[column] == "kept":
                drawing.arrow((30 + 27 * column, y), (30 + 27 * column, below + 7))
        if again:
            drawing.arrow((40, y), (47, below + 7))
            drawing.arrow((67, below + 3.5), (74, below + 3.5))
    words = {"kept": "in memory", "dropped": "not in memory", "again": "computed a second time"}
    drawing.legend(24, 0.3, words, 25)
    return drawing

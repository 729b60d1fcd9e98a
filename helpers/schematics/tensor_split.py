"""Schematics of lesson 16: a matrix cut over ranks, and Megatron's two cuts in a row."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing


def two_cuts() -> Drawing:
    """A feed-forward layer over two ranks: first matrix by columns, second by rows."""
    alt = (
        "A feed-forward layer on two ranks. Both have the whole input X. The first matrix is cut "
        "by columns, so each rank computes half of the hidden units and applies GELU to them. The "
        "second matrix is cut by rows: each rank multiplies its half, and one all-reduce adds the "
        "two results up. Nothing is sent between the two matrices."
    )
    drawing = Drawing(100, 42, alt)
    heads = (
        (7, "input X"),
        (27, "W1 by columns"),
        (47, "GELU"),
        (65, "W2 by rows"),
        (90, "output"),
    )
    for x, word in heads:
        drawing.text(x, 39.5, word, size=10, bold=True)
    for rank in range(2):
        y, kind = 23 - 17 * rank, f"rank {rank}"
        middle = y + 6
        drawing.box(2, y, 10, 12, "X\n(whole)", "kept")
        drawing.arrow((12.3, middle), (17.5, middle))
        own, other = (18, 27.3) if rank == 0 else (27.3, 18)
        drawing.box(own, y, 8.5, 12, f"half {rank + 1}\nof W1", kind, size=8.5)
        drawing.box(other, y, 8.5, 12, "", "dropped")
        drawing.arrow((36.2, middle), (41.5, middle))
        drawing.box(42, y, 10, 12, f"half {rank + 1}\nof hidden\nunits", kind, size=8.5)
        drawing.arrow((52.3, middle), (57, middle))
        own, other = (y + 6.2, y) if rank == 0 else (y, y + 6.2)
        drawing.box(57.5, own, 15, 5.8, f"half {rank + 1} of W2", kind, size=8.5)
        drawing.box(57.5, other, 15, 5.8, "", "dropped")
        drawing.arrow((72.8, middle), (78, 20.5 + (2 if rank == 0 else -2)))
        drawing.text(7, y - 1.9, f"rank {rank}", size=9)
    drawing.box(78.5, 15.5, 7.5, 10, "all-\nreduce\n(sum)", "plain", size=8.5)
    drawing.arrow((86.3, 20.5), (89, 20.5))
    drawing.box(89.5, 14.5, 9, 12, "Y\n(whole,\non both)", "kept", size=8.5)
    return drawing


def heads() -> Drawing:
    """Attention over two ranks: each has half of the heads."""
    alt = (
        "Attention with four heads on two ranks. Rank 0 computes heads 1 and 2, rank 1 computes "
        "heads 3 and 4: their queries, keys and values are columns of the projection matrices. "
        "The output projection is cut by rows, and one all-reduce adds the two results up."
    )
    drawing = Drawing(100, 26, alt)
    for rank in range(2):
        y, kind = 14 - 11 * rank, f"rank {rank}"
        drawing.text(7, y + 4, f"rank {rank}", size=9)
        drawing.box(13, y, 14, 8, "X (whole)", "kept")
        drawing.arrow((27.3, y + 4), (31.5, y + 4))
        drawing.row(32, y, 11, 8, [f"head {2 * rank + 1}", f"head {2 * rank + 2}"], kind)
        drawing.arrow((54.3, y + 4), (58, y + 4))
        drawing.box(58.5, y, 16, 8, "half of the output\nprojection (rows)", kind, size=8.5)
        drawing.arrow((74.8, y + 4), (79.5, 12.8 + (1 if rank == 0 else -1)))
    drawing.box(80, 8, 8, 9.5, "all-\nreduce\n(sum)", "plain", size=8.5)
    drawing.arrow((88.3, 12.8), (90.5, 12.8))
    drawing.box(91, 8, 8, 9.5, "output", "kept", size=8.5)
    return drawing

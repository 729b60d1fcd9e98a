"""Schematics of lesson 13: one batch over several copies of the model."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing


def copies_and_shares() -> Drawing:
    """Four ranks, each with the whole model and a quarter of the batch."""
    alt = (
        "Four GPUs, called ranks. Each has a full copy of the model and its own quarter of the "
        "batch, and computes its own gradient. An all-reduce adds the four gradients up and gives "
        "every rank the sum. So all ranks make the same optimizer step and stay equal."
    )
    drawing = Drawing(100, 46, alt)
    drawing.text(50, 43.5, "one batch of 16 examples", size=10, bold=True)
    for rank in range(4):
        left, kind = 3 + 24.5 * rank, f"rank {rank}"
        first = 4 * rank + 1
        drawing.box(left, 35, 20.5, 5.5, f"examples {first} to {first + 3}", kind)
        drawing.arrow((left + 10.2, 35), (left + 10.2, 31))
        drawing.box(left, 23, 20.5, 8, f"rank {rank}: the whole\nmodel, optimizer", "trained")
        drawing.arrow((left + 10.2, 23), (left + 10.2, 19), "backward")
        drawing.box(left, 14, 20.5, 5, "its gradient", "gradient")
        drawing.arrow((left + 10.2, 14), (left + 10.2, 10.5))
        drawing.arrow((left + 10.2, 5), (left + 10.2, 2))
        drawing.text(left + 10.2, 1, "the same step", size=8.5)
    drawing.box(
        3, 5, 94, 5.5, "all-reduce: add the four gradients, give everybody the sum", "plain"
    )
    return drawing


def ring() -> Drawing:
    """What four ranks hold before, between and after the two halves of a ring all-reduce."""
    alt = (
        "Three tables of four ranks by four pieces of the gradient. At the start every rank has "
        "its own numbers in all pieces. After the reduce-scatter each rank has one piece that is "
        "the sum over all four ranks. After the all-gather every rank has all four finished pieces."
    )
    drawing = Drawing(100, 36, alt)
    done = {0: 1, 1: 2, 2: 3, 3: 0}  # the piece that a rank finishes
    titles = ("start", "after reduce-scatter", "after all-gather")
    for table, title in enumerate(titles):
        left = 9 + 31.5 * table
        drawing.text(left + 12, 33.5, title, size=10, bold=True)
        for rank in range(4):
            y = 24 - 6.5 * rank
            if table == 0:
                drawing.text(left - 1, y + 2.5, f"rank {rank}", size=9, align="right")
            for piece in range(4):
                own = f"rank {rank}"
                if table == 2 or (table == 1 and done[rank] == piece):
                    drawing.box(left + 6 * piece, y, 5.4, 5, "sum", "kept", size=8)
                else:
                    kind = own if table == 0 else "dropped"
                    drawing.box(left + 6 * piece, y, 5.4, 5, "own" if table == 0 else "", kind, 8)
    drawing.arrow((34, 17), (39, 17))
    drawing.arrow((65.5, 17), (70.5, 17))
    drawing.text(52.5, 1.2, "pieces of the gradient from left to right", size=8.5)
    return drawing

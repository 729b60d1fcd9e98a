"""Schematics of lessons 18 and 19: which technique first, and what a ladder of them is."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing


def tree() -> Drawing:
    """Three questions that lead to a layout."""
    alt = (
        "A decision tree. First: does the step fit one GPU, with mixed precision, smaller "
        "micro-batches and checkpointing? If yes and you have several GPUs, use data parallelism. "
        "If no: are the GPUs in one machine with fast links? Then FSDP. Between machines with slow "
        "links: FSDP or tensor parallelism inside each machine, and pipeline stages between them."
    )
    drawing = Drawing(100, 52, alt)
    drawing.box(22, 42, 56, 9, "Does the step fit ONE GPU?\n(16 bits, small micro-batches)")
    drawing.arrow((36, 42), (21, 34.5), "yes")
    drawing.arrow((64, 42), (73, 34.5), "no")
    drawing.box(3, 25.5, 36, 9, "Is one GPU fast enough?")
    drawing.box(47, 25.5, 50, 9, "Do all GPUs have fast links\nto each other?")
    drawing.arrow((14, 25.5), (10, 17), "yes")
    drawing.arrow((30, 25.5), (34, 17), "no")
    drawing.arrow((61, 25.5), (60, 17), "yes")
    drawing.arrow((83, 25.5), (85, 17), "no")
    leaf = "trained"
    drawing.box(1, 4, 20, 13, "one GPU:\naccumulate\n(02, 04, 06)", leaf)
    drawing.box(24, 4, 22, 13, "data parallel,\nDDP (13)", leaf)
    drawing.box(49, 4, 22, 13, "shards, FSDP (14);\nlong examples:\nalso tensor (16)", leaf)
    drawing.box(74, 4, 25, 13, "FSDP or tensor inside\na machine, pipeline\nbetween (15)", leaf)
    return drawing


def ladder() -> Drawing:
    """A ladder of techniques, and three ways to ask what one of them is worth."""
    alt = (
        "Three columns of four boxes for techniques A to D. Alone: only C is switched on. On its "
        "rung: A and B are on already and C is added. Taken away: all four are on and only C is "
        "switched off. The three answers to what C saves are different."
    )
    drawing = Drawing(100, 34, alt)
    columns = (
        (8, "alone", "start + C", {"C"}),
        (41, "on its rung", "A + B, then C", {"A", "B", "C"}),
        (74, "taken away", "all of them but C", {"A", "B", "D"}),
    )
    for left, title, below, on in columns:
        drawing.text(left + 9, 32, title, size=10.5, bold=True)
        for row, name in enumerate("ABCD"):
            kind = "again" if name == "C" and name in on else "trained" if name in on else "dropped"
            drawing.box(left, 5 + 6 * row, 18, 5, f"technique {name}", kind)
        drawing.text(left + 9, 2, below, size=9)
    return drawing

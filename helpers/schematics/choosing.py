"""Schematics of lessons 18 and 19: which technique first, and what a ladder of them is."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing


def tree() -> Drawing:
    """Four questions that lead to a layout."""
    alt = (
        "A decision tree. First: does the step fit one GPU, with 16 bits, small micro-batches and "
        "checkpointing? If yes: is one GPU fast enough? Then use one GPU; else data parallelism, "
        "DDP. If no: what fills the GPU? If the activations of a single long example: context or "
        "tensor ranks beside FSDP. If the parameters, gradients and optimizer states: are the "
        "links between all GPUs fast? If yes, FSDP. If no: FSDP inside a machine, and replicas or "
        "pipeline stages between machines."
    )
    drawing = Drawing(100, 66, alt)
    drawing.box(
        20, 56, 60, 9, "Does the step fit ONE GPU?\n(16 bits, 1 example at a time, checkpointing)"
    )
    drawing.arrow((34, 56), (21, 48.5), "yes")
    drawing.arrow((66, 56), (73, 48.5), "no")
    drawing.box(2, 39.5, 36, 9, "Is one GPU fast enough?")
    drawing.box(50, 39.5, 48, 9, "What fills the GPU?")
    drawing.arrow((12, 39.5), (9.5, 17), "yes")
    drawing.arrow((28, 39.5), (29.5, 17), "no")
    drawing.arrow((62, 39.5), (58, 33.5), "the model")
    drawing.arrow((88, 39.5), (89, 17), "one long\nexample")
    drawing.box(40, 24.5, 40, 9, "Are the links between\nall GPUs fast?")
    drawing.arrow((52, 24.5), (49, 17), "yes")
    drawing.arrow((68, 24.5), (70, 17), "no")
    leaf = "trained"
    drawing.box(0.5, 4, 18, 13, "one GPU:\naccumulate\n(02, 04, 06)", leaf)
    drawing.box(20.5, 4, 18, 13, "data\nparallel, DDP\n(13)", leaf)
    drawing.box(40.5, 4, 17, 13, "FSDP over\nall GPUs\n(14)", leaf)
    drawing.box(59.5, 4, 20, 13, "FSDP in a machine,\nreplicas (14) or\nstages (15) between", leaf)
    drawing.box(81.5, 4, 18, 13, "FSDP beside\ncontext (24) or\ntensor ranks (16)", leaf)
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

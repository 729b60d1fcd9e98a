"""Schematics of lesson 25: who starts whom on a cluster, and what a lost rank costs."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

STEPS, EVERY, LOST = 20, 5, 13  # of the lesson's runs


def two_machines() -> Drawing:
    """Two machines of two ranks: rendezvous, messages, and a checkpoint of shards."""
    alt = (
        "Two machines. On each one torchrun starts two ranks. Both torchruns meet at one address, "
        "the rendezvous, which tells them how many ranks there are and who is rank 0. All four "
        "ranks exchange messages directly. Each writes its own shard to a checkpoint in a folder "
        "that both machines see, and .metadata is written last."
    )
    drawing = Drawing(100, 58, alt)
    drawing.box(
        30, 50, 40, 6, "rendezvous at first:29400:\nwho is here, and who is rank 0?", "kept"
    )
    for machine in range(2):
        left = 2 + 50 * machine
        drawing.box(left, 20.5, 46, 24, kind="dropped")
        if machine == 0:
            drawing.text(left + 2, 42.5, "machine 0, called first", align="left")
        else:
            drawing.text(left + 44, 42.5, "machine 1", align="right")
        drawing.box(left + 10, 35.5, 26, 5, "torchrun --nnodes 2")
        meets = 40 if machine == 0 else 60
        drawing.arrow((left + 30 - 14 * machine, 40.5), (meets, 50))
        for local in range(2):
            rank, x = 2 * machine + local, left + 3 + 22 * local
            drawing.arrow((left + 23, 35.5), (x + 9, 31))
            drawing.box(x, 25, 18, 6, f"rank {rank}", f"rank {rank}", size=10)
            drawing.arrow((x + 9, 25), (x + 9, 13.5))
            drawing.box(x, 7.5, 18, 6, f"shard of rank {rank}", f"rank {rank}", size=8.5)
    for left, right in ((23, 27), (45, 55), (73, 77)):
        drawing.arrow((left, 28), (right, 28))
        drawing.arrow((right, 28), (left, 28))
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    drawing.text(50, 24.5, "gradients", size=8.5, box=white)
    drawing.text(50, 15.5, "every rank saves its own shard", size=8.5)
    drawing.brace(5, 95, 5, "folder that both machines see: step-10, with .metadata written last")
    return drawing


def a_lost_rank() -> Drawing:
    """The steps that are done when a rank is lost in step 13 of 20, without and with saving."""
    alt = (
        "Two rows of training steps. A rank is lost in step 13. Without a checkpoint steps 1 to 12 "
        "are done again after the restart. With a checkpoint after every fifth step the restart "
        "goes on after step 10, and only steps 11 and 12 are done again."
    )
    drawing = Drawing(100, 34, alt)
    wide, left = 2.55, 12
    for y, title, start in ((20, "no checkpoint", 0), (5, "saved every\n5 steps", 10)):
        drawing.text(left - 1, y + 2.5, title, align="right")
        again = range(start, LOST - 1)
        numbers = [*range(LOST - 1), *range(start, STEPS)]
        for place, step in enumerate(numbers):
            restarted = place >= LOST - 1
            kind = "again" if restarted and step in again else "trained"
            x = left + wide * place + 2.5 * restarted
            drawing.box(x, y, wide - 0.25, 5, str(step + 1), kind, size=7)
            if start and (step + 1) % EVERY == 0:
                drawing.arrow((x + wide / 2, y), (x + wide / 2, y - 3))
        x = left + wide * (LOST - 1) + 1.1
        drawing.text(x, y + 7.3, "lost", size=8.5)
        drawing.text(x, y + 2.5, "×", size=13, bold=True)
    drawing.legend(left, 30, {"trained": "a step", "again": "a step done again"}, 14)
    drawing.text(left, 0.9, "an arrow down is a save", size=8.5, align="left")
    return drawing

"""Schematics of lesson 14: which rank holds which part of the training state."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

PARTS = ("parameters", "gradients", "optimizer\nstates")


def stages() -> Drawing:
    """Who holds what on four ranks, from plain data parallelism to ZeRO stage 3."""
    alt = (
        "Four panels for four ranks. With data parallelism every rank holds all parameters, all "
        "gradients and all optimizer states. ZeRO stage 1 cuts the optimizer states into four "
        "shards, stage 2 also the gradients, and stage 3, which FSDP does, also the parameters."
    )
    drawing = Drawing(100, 44, alt)
    titles = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 = FSDP")
    for stage, title in enumerate(titles):
        left = 11 + 22.5 * stage
        drawing.text(left + 9.5, 41.5, title, size=10.5, bold=True)
        for row, part in enumerate(PARTS):
            y = 28 - 12.5 * row
            if stage == 0:
                drawing.text(left - 0.8, y + 4.5, part, size=9, align="right")
            sharded = row >= 3 - stage
            for rank in range(4):
                x = left + 4.8 * rank
                if sharded:
                    drawing.box(x, y, 4.2, 9, "", "dropped")
                    drawing.box(x, y + 9 - 2.25 * (rank + 1), 4.2, 2.25, "", f"rank {rank}")
                else:
                    drawing.box(x, y, 4.2, 9, "", f"rank {rank}")
    for stage in range(4):
        for rank in range(4):
            drawing.text(13.1 + 22.5 * stage + 4.8 * rank, 1, str(rank), size=8.5)
    drawing.text(6, 1, "rank", size=8.5)
    return drawing


def one_layer() -> Drawing:
    """What FSDP does with one layer: gather, use, drop; and in the backward pass again."""
    alt = (
        "From left to right for one layer: its shards lie on four ranks; an all-gather makes the "
        "whole layer on every rank; the forward pass uses it; the other ranks' shards are dropped. "
        "The backward pass gathers again, and a reduce-scatter leaves each rank its gradient shard."
    )
    drawing = Drawing(100, 30, alt)
    steps = (
        (2, "shards", "rank 0"),
        (21, "whole layer", "trained"),
        (40, "shards", "rank 0"),
        (59, "whole layer", "trained"),
        (78, "gradients", "gradient"),
    )
    for x, word, kind in steps:
        whole = kind == "trained"
        for rank in range(4):
            y = 20 - 5.2 * rank
            wide = 15 if whole else 4.5
            start = x if whole else x + 3.5 * rank
            drawing.box(start, y, wide, 4, "", kind if kind != "rank 0" else f"rank {rank}")
        drawing.text(x + 7.5, 1.5, word, size=9, bold=whole)
    for left, word in (
        (18.5, "all-\ngather"),
        (37.5, "forward,\ndrop"),
        (56.5, "all-\ngather"),
        (76, "backward,\nreduce-\nscatter"),
    ):
        drawing.text(left + 0.3, 27, word, size=8)
        drawing.arrow((left - 1.2, 12), (left + 2.2, 12))
    return drawing

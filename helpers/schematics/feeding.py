"""Schematics of lesson 08: who waits for whom between the CPU and the GPU."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing


def without_and_with_worker() -> Drawing:
    """Batches prepared between the steps, and by a worker during them."""
    alt = (
        "Above: the main process prepares a batch, then the GPU trains on it, and so on in turns; "
        "the GPU waits during each preparation. Below: a worker prepares the next batch while the "
        "GPU trains, so the GPU waits only for the first batch."
    )
    drawing = Drawing(100, 48, alt)
    drawing.text(2, 45.5, "without a worker: in turns", size=10.5, align="left", bold=True)
    drawing.text(12, 39.5, "CPU", align="right")
    drawing.text(12, 32, "GPU", align="right")
    for index in range(4):
        left = 14 + 20 * index
        drawing.box(left, 36.5, 8, 6, f"make {index + 1}", "kept")
        drawing.box(left, 29, 8, 6, "waits", "waiting", size=8)
        drawing.box(left + 8, 29, 12, 6, f"train {index + 1}", "trained")
    drawing.text(2, 22.5, "with one worker: at the same time", size=10.5, align="left", bold=True)
    drawing.text(12, 16.5, "worker", align="right")
    drawing.text(12, 9, "GPU", align="right")
    for index in range(4):
        drawing.box(14 + 8 * index, 13.5, 8, 6, f"make {index + 1}", "kept")
        drawing.box(22 + 12 * index, 6, 12, 6, f"train {index + 1}", "trained")
    drawing.box(14, 6, 8, 6, "waits", "waiting", size=8)
    drawing.arrow((14, 2.5), (96, 2.5), "time")
    return drawing

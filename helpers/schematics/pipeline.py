"""Schematics of lesson 15: the layers cut into stages, and who works when."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

STAGES = 4
Action = tuple[str, int]  # ("F" or "B", number of the micro-batch)


def stages() -> Drawing:
    """A model of eight layers, cut into four stages on four GPUs."""
    alt = (
        "A model of eight layers, cut into four stages of two layers, each on a GPU of its own. "
        "Forward, every stage sends its output, the activations at the cut, to the next one. "
        "Backward, it sends the gradient of these activations back to the stage before."
    )
    drawing = Drawing(100, 30, alt)
    for stage in range(STAGES):
        left = 3 + 24.5 * stage
        drawing.text(left + 9, 27.5, f"rank {stage}", size=10, bold=True)
        drawing.row(
            left, 9, 9, 14, [f"layer\n{2 * stage + 1 + i}" for i in (0, 1)], f"rank {stage}"
        )
        if stage < STAGES - 1:
            drawing.arrow((left + 18.2, 19), (left + 24.3, 19))
            drawing.arrow((left + 24.3, 12), (left + 18.2, 12), dashed=True)
    drawing.arrow((24, 3.5), (30, 3.5))
    drawing.text(31, 3.5, "activations, forward", size=9, align="left")
    drawing.arrow((60, 3.5), (54, 3.5), dashed=True)
    drawing.text(61, 3.5, "their gradients, backward", size=9, align="left")
    return drawing


def one_batch() -> Drawing:
    """One batch through four stages: three of four GPUs wait."""
    alt = (
        "Time runs to the right, one row per rank. One batch goes forward through ranks 0, 1, 2, 3 "
        "and backward through 3, 2, 1, 0. At every moment one rank works and three wait."
    )
    return _chart(alt, [[("F", 0), ("B", 0)]] * STAGES)


def gpipe(micro_batches: int = 6) -> Drawing:
    """GPipe: all micro-batches forward, then all backward."""
    alt = (
        f"Time runs to the right, one row per rank. {micro_batches} micro-batches go forward one "
        "behind the other, then all go backward. Ranks wait at the start, in the middle and at the "
        "end: this waiting is the bubble. Rank 0 holds all micro-batches before its first backward."
    )
    forward = [("F", m) for m in range(micro_batches)]
    backward = [("B", m) for m in range(micro_batches)]
    return _chart(alt, [forward + backward] * STAGES)


def one_forward_one_backward(micro_batches: int = 6) -> Drawing:
    """1F1B: every rank turns to backward as soon as it can."""
    alt = (
        f"Time runs to the right, one row per rank. {micro_batches} micro-batches: each rank does "
        "some forward passes, then alternates one backward and one forward. The bubble is as long "
        "as in GPipe, but a rank never holds more micro-batches than there are stages."
    )
    orders = []
    for stage in range(STAGES):
        warm = min(STAGES - stage, micro_batches)
        order: list[Action] = [("F", m) for m in range(warm)]
        for m in range(micro_batches):
            order.append(("B", m))
            if warm + m < micro_batches:
                order.append(("F", warm + m))
        orders.append(order)
    return _chart(alt, orders)


def _times(orders: list[list[Action]]) -> dict[tuple[int, str, int], tuple[int, int]]:
    """{(stage, "F" or "B", micro-batch): (begin, end)}, forward takes 1 and backward 2."""
    done: dict[tuple[int, str, int], tuple[int, int]] = {}
    free, next_ = [0] * STAGES, [0] * STAGES
    while any(n < len(order) for n, order in zip(next_, orders)):
        for stage, order in enumerate(orders):
            if next_[stage] == len(order):
                continue
            kind, micro = order[next_[stage]]
            before = stage - 1 if kind == "F" else stage + 1
            waits = 0 <= before < STAGES
            if waits and (before, kind, micro) not in done:
                continue
            ready = done[before, kind, micro][1] if waits else 0
            begin = max(free[stage], ready)
            end = begin + (1 if kind == "F" else 2)
            done[stage, kind, micro] = (begin, end)
            free[stage], next_[stage] = end, next_[stage] + 1
    return done


def _chart(alt: str, orders: list[list[Action]]) -> Drawing:
    done = _times(orders)
    last = max(end for _, end in done.values())
    drawing = Drawing(100, 26, alt)
    unit = 88 / last
    for stage in range(STAGES):
        y = 19.5 - 5 * stage
        drawing.text(9, y + 2.1, f"rank {stage}", size=9, align="right")
        drawing.box(10, y, 88, 4.2, "", "waiting")
    for (stage, kind, micro), (begin, end) in done.items():
        y = 19.5 - 5 * stage
        box = "kept" if kind == "F" else "gradient"
        drawing.box(10 + begin * unit, y, (end - begin) * unit, 4.2, str(micro + 1), box, size=8)
    words = {"kept": "forward", "gradient": "backward", "waiting": "waits"}
    drawing.legend(12, 0.8, words, step=29)
    return drawing

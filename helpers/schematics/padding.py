"""Schematics of lessons 09 and 10: where the padding of a batch is, and which texts meet in it."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.schematics.drawing import Drawing

TEXTS = {"A": 6, "B": 21, "C": 12, "D": 15}  # tokens of the four texts that the drawings show


def fixed_and_dynamic() -> Drawing:
    """Four texts padded to a fixed length, to their longest, and in micro-batches of two."""
    alt = (
        "Four texts of 6, 21, 12 and 15 tokens. Left: all are padded to 24 tokens. Middle: all are "
        "padded to 21, the longest of the batch. Right: two micro-batches of two texts, one padded "
        "to 21 and one to 15 tokens, with less padding in all."
    )
    drawing = Drawing(100, 40, alt)
    drawing.text(15, 37, "fixed length: 24", size=10.5, bold=True)
    _batch(drawing, 3, 28, "ABCD", 24)
    drawing.text(48, 37, "longest of the batch: 21", size=10.5, bold=True)
    _batch(drawing, 38, 28, "ABCD", 21)
    drawing.text(83, 37, "two micro-batches", size=10.5, bold=True)
    _batch(drawing, 73, 28, "AB", 21)
    _batch(drawing, 73, 15, "CD", 15)
    for left, padding in ((15, 42), (48, 30), (83, 18)):
        drawing.text(left, 7.5, f"{padding} tokens of padding")
    drawing.legend(35, 1, {"kept": "tokens of a text", "waiting": "padding"}, 18)
    return drawing


def five_methods() -> Drawing:
    """The same four texts in batches made by five methods."""
    alt = (
        "Four texts of 6, 21, 12 and 15 tokens under five methods. Fixed: four texts of 24. "
        "Dynamic: texts A and B padded to 21, C and D to 15. Length buckets: A and C padded to 12, "
        "D and B padded to 21. Token budget of 45: A, C and D padded to 15, and B alone. "
        "Packing: B and A in one row of 27, and D and C in another, with no padding."
    )
    drawing = Drawing(140, 46, alt, inches=9.5)
    named = {
        "fixed": [("ABCD", 24)],
        "dynamic": [("AB", 21), ("CD", 15)],
        "length buckets": [("AC", 12), ("DB", 21)],
        "token budget: 45": [("ACD", 15), ("B", 21)],
    }
    for left, (name, batches) in zip((2, 30, 55, 80), named.items()):
        drawing.text(left + 11, 43, name, size=10, bold=True)
        top = 34.0
        for texts, length in batches:
            _batch(drawing, left, top, texts, length)
            top -= 6 * len(texts) + 1.5
    drawing.text(121, 43, "packing", size=10, bold=True)
    for top, texts in ((34.0, "BA"), (26.5, "DC")):
        x = 106.0
        for text, kind in zip(texts, ("kept", "rank 1")):
            drawing.box(x, top, TEXTS[text], 5, text, kind)
            x += TEXTS[text]
    counts = ("42 padding", "18 padding", "12 padding", "12 padding", "0 padding")
    for middle, count in zip((14, 40, 66, 91, 121), counts):
        drawing.text(middle, 6.5, count)
    legend = {"kept": "tokens of a text", "waiting": "padding", "rank 1": "second text of a row"}
    drawing.legend(28, 0.5, legend, 30)
    return drawing


def _batch(drawing: Drawing, left: float, top: float, texts: Sequence[str], length: int) -> None:
    """One line per text, the first at height `top`, padded to `length` tokens."""
    for index, text in enumerate(texts):
        tokens, y = TEXTS[text], top - 6 * index
        drawing.box(left, y, tokens, 5, text, "kept")
        if tokens < length:
            drawing.box(left + tokens, y, length - tokens, 5, kind="waiting")

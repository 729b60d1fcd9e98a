"""Schematics of lesson 05: the bytes of a parameter, and a block of eight bits with its scale."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

BYTE = 3.4
ROWS = (
    ("AdamW", (("weight", 4, "trained"), ("gradient", 4, "gradient"), ("m", 4, "state"))),
    ("8-bit AdamW", (("weight", 4, "trained"), ("gradient", 4, "gradient"), ("m", 1, "state"))),
)


def bytes_per_parameter() -> Drawing:
    """What one parameter takes in memory, byte by byte, with AdamW and with 8-bit AdamW."""
    alt = (
        "Two rows of boxes, one box per byte. With AdamW a parameter takes 4 bytes of weight, 4 of "
        "gradient, 4 of the state m and 4 of the state v, 16 in all. With 8-bit AdamW the states "
        "take 1 byte each, 10 bytes in all, and two scales for every 256 parameters."
    )
    drawing = Drawing(100, 37, alt)
    for index, (name, groups) in enumerate(ROWS):
        y = 24 - 15 * index
        drawing.text(1, y + 3, name, size=10.5, align="left", bold=True)
        left, total = 18.0, 0
        for word, count, kind in (*groups, ("v", groups[-1][1], "state")):
            drawing.row(left, y, BYTE, 6, [""] * count, kind)
            drawing.text(left + count * BYTE / 2, y + 8, word)
            left += count * BYTE + 2
            total += count
        drawing.text(left + 1, y + 3, f"= {total} bytes", align="left", size=10)
    drawing.text(74, 12, "+ 2 scales\nper 256 parameters", align="left")
    words = {"trained": "weight", "gradient": "gradient", "state": "optimizer states"}
    drawing.legend(18, 1, words, 22)
    return drawing


def one_block() -> Drawing:
    """Eight numbers become one scale and eight codes of one byte, and come back nearly equal."""
    alt = (
        "Four rows. The block 0.5, -0.02, 0.1, 0.3 of fp32 numbers is divided by its largest "
        "element 0.5, which is kept as the scale. Each result is replaced by the number of the "
        "nearest of 256 levels, one byte. Reading multiplies the level by the scale again."
    )
    drawing = Drawing(100, 46, alt)
    rows = (
        ("4 bytes each", ("0.5", "-0.02", "0.1", "0.3"), "plain", "a block of numbers"),
        ("", ("1", "-0.04", "0.2", "0.6"), "plain", "divided by the largest, 0.5"),
        ("1 byte each", ("127", "-5", "25", "76"), "state", "number of the nearest level"),
        ("", ("0.5", "-0.0197", "0.0984", "0.2992"), "plain", "level / 127, times 0.5"),
    )
    for index, (size, values, kind, what) in enumerate(rows):
        y = 38 - 12 * index
        drawing.text(1, y + 3, what, align="left")
        drawing.row(33, y, 11, 6, values, kind, gap=1)
        drawing.text(82, y + 3, size, align="left")
        if index:
            drawing.arrow((56, y + 12), (56, y + 6.2))
    drawing.box(81.5, 7, 13, 5, "scale: 0.5", "state", size=8.5)
    return drawing

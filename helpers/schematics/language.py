"""Schematics of lesson 20: what a language model holds that a classifier does not."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

SEEN = (  # of a packed row of seven tokens: the texts, token by token
    ("A", 0),
    ("A", 1),
    ("A", 2),
    ("B", 0),
    ("B", 1),
    ("B", 2),
    ("B", 3),
)


def logits() -> Drawing:
    """Hidden states, the output layer and the logits, as wide as they are; below, in chunks."""
    alt = (
        "Above: hidden states of 1,024 numbers per token go through the output layer and become "
        "logits of 151,936 numbers per token, drawn as a far wider box, and then the loss. Below: "
        "the same in chunks of tokens. Of each chunk the logits are made, turned into gradients of "
        "the hidden states, and dropped before the next chunk begins. The gradient of the output "
        "layer is kept as well."
    )
    drawing = Drawing(100, 56, alt)
    drawing.text(1, 53.5, "all logits at once", size=11, bold=True, align="left")
    drawing.box(1, 36, 5, 14, "", "kept")
    drawing.text(1, 33, "hidden states\ntokens × 1,024", size=9, align="left")
    drawing.arrow((6.5, 43), (21, 43), "output layer")
    drawing.box(
        21,
        36,
        64,
        14,
        "logits: tokens × 151,936\n(the real box is 148 times as wide "
        "as the hidden states,\nand more of this size come after it:\nthe logarithms, "
        "two gradients)",
        "kept",
    )
    drawing.arrow((85, 43), (93, 43))
    drawing.box(93, 40, 6, 6, "loss")

    drawing.text(1, 27, "in chunks", size=11, bold=True, align="left")
    names = ("chunk 1", "chunk 2", "chunk 3", "chunk 4")
    kinds = ("dropped", "dropped", "kept", "dropped")
    words = ("made, used, dropped", "made, used, dropped", "now in memory", "not made yet")
    for number, (name, kind, word) in enumerate(zip(names, kinds, words)):
        low = 20.5 - 5 * number
        drawing.box(1, low, 5, 4, "", "kept")
        drawing.arrow((6.5, low + 2), (21, low + 2))
        drawing.box(21, low, 50, 4, f"logits of {name}: {word}", kind)
        drawing.box(92, low, 5, 4, "", "gradient" if number < 3 else "dropped")
        if number < 3:
            drawing.arrow((71.5, low + 2), (91.5, low + 2))
    drawing.text(99, 27, "gradients of the hidden states", size=9, align="right")
    drawing.text(90, 1.8, "and of the output layer", size=9, align="right")
    drawing.box(92, 0.4, 5, 3.2, "", "gradient")
    shown = {"kept": "in memory", "gradient": "gradients, kept", "dropped": "not in memory"}
    drawing.legend(1, 0.5, shown, 20)
    return drawing


def packing() -> Drawing:
    """Two texts in one row: positions, labels, and who may look at whom."""
    alt = (
        "A row of seven tokens holds two texts, A with three tokens and B with four. Positions "
        "count 0, 1, 2 and then again 0, 1, 2, 3. A square of seven by seven cells shows which "
        "token may look at which: two triangles, one per text, and nothing between them."
    )
    drawing = Drawing(100, 52, alt)
    drawing.text(1, 48, "one row of the batch", size=11, bold=True, align="left")
    rows = (
        ("tokens", [f"{name}{place + 1}" for name, place in SEEN]),
        ("position ids", [str(place) for _, place in SEEN]),
        ("labels", ["-100", "A2", "A3", "-100", "B2", "B3", "B4"]),
    )
    kinds = ["rank 0" if name == "A" else "rank 1" for name, _ in SEEN]
    for line, (word, texts) in enumerate(rows):
        drawing.text(1, 41.2 - 8 * line, word, align="left")
        drawing.row(11, 39 - 8 * line, 5.4, 5, texts, kinds, gap=0.3)
    drawing.text(
        11,
        18,
        "The first token of a text has no label:\nwhat precedes it is another text.",
        align="left",
    )
    drawing.text(58, 48, "the token of this row may look at ...", size=11, bold=True, align="left")
    for line, (name, place) in enumerate(SEEN):
        y = 38 - 5.2 * line
        drawing.text(61, y + 2.4, f"{name}{place + 1}")
        for column, (other, earlier) in enumerate(SEEN):
            seen = name == other and earlier <= place
            kind = ("rank 0" if name == "A" else "rank 1") if seen else "dropped"
            drawing.box(64 + 4.8 * column, y, 4.4, 4.8, "", kind)
    for column, (other, earlier) in enumerate(SEEN):
        drawing.text(66.2 + 4.8 * column, 44.5, f"{other}{earlier + 1}")
    words = {"rank 0": "text A", "rank 1": "text B", "dropped": "never looked at"}
    drawing.legend(1, 2, words, 18)
    return drawing

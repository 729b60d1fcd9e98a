"""docs/rehearsal.md: which notebooks ran on which pretended GPUs, made from docs/rehearsal.json."""

from __future__ import annotations

import csv

from benchmarks import markdown
from benchmarks.pages import with_block
from helpers.tables import Table
from tight_fit.files import replace_all
from tools.pretend.cards import CARDS
from tools.pretend.kept import FILE, Kept, Recorded, Rehearsed, read

PAGE = FILE.with_suffix(".md")
MENDED = PAGE.parent / "data" / "mended.csv"


def table(rows: list[Rehearsed]) -> str:
    """A row for each kind and number of GPUs, in Markdown; the notebooks are in rehearsal.json."""
    names = {row.notebook for row in rows}
    lines = []
    for count, card in sorted({(r.count, r.card) for r in rows}, key=_in_order):
        there = [row for row in rows if (row.card, row.count) == (card, count)]
        missing = sorted(names - {row.notebook for row in there})
        lines.append(
            {
                "GPUs": f"{count} × {card}",
                "notebooks": len(there),
                "not rehearsed": ", ".join(map(_short, missing)) or "none",
                "code cells": sum(row.cells for row in there),
                "ran to their end": sum(row.ran for row in there),
                "excused": sum(len(row.excused) for row in there),
                "failed": sum(len(row.failed) for row in there),
                "minutes": f"{sum(row.seconds for row in there) / 60:.0f}",
            }
        )
    return markdown.of(Table(lines)) if lines else "Nothing has been rehearsed yet."


def _in_order(gpus: tuple[int, str]) -> tuple[int, int]:
    return gpus[0], list(CARDS).index(gpus[1])


def _short(notebook: str) -> str:
    return f"{'lab' if notebook.endswith('_lab') else 'lesson'} {notebook[:2]}"


def found() -> str:
    """How many defects that a GPU would have met were found, and how, in a sentence."""
    with MENDED.open(encoding="utf8", newline="") as lines:
        ways = [row["found by"] for row in csv.DictReader(lines)]
    by_reading = sum("reading" in way for way in ways)
    return (
        f"{len(ways)} defects that only a GPU would have met were found and mended: "
        f"{by_reading} by reading the code for what a GPU does with it, {len(ways) - by_reading} "
        "by what ran. "
        "[data/mended.csv](data/mended.csv) has each of them, with how it was found and what is "
        "so now."
    )


def _first(error: str) -> str:
    return error.splitlines()[0].replace("`", "'")


def records(rows: list[Recorded]) -> str:
    """A row for each time that `make record` was rehearsed, in Markdown."""
    lines = [
        {
            "GPUs": f"{row.count} × {row.card}",
            "minutes given": row.minutes,
            "minutes taken": " + ".join(f"{seconds / 60:.0f}" for seconds in row.seconds),
            "steps measured": row.steps,
            "furthest from its plan": f"{row.off:.1%}",
            "lessons recorded": row.lessons,
            "failed": "; ".join(row.failed) or "none",
            "left": "some" if row.left else "none",
        }
        for row in rows
    ]
    if not lines:
        return "It has not been rehearsed yet."
    return markdown.of(Table(lines))


def written(text: str, kept: Kept) -> str:
    """The page with its tables made anew."""
    text = with_block(text, "found", found())
    text = with_block(text, "recorded", records(kept.records))
    return with_block(text, "rehearsed", _notebooks(kept.notebooks).rstrip("\n"))


def _notebooks(rows: list[Rehearsed]) -> str:
    ran, cells = sum(row.ran for row in rows), sum(row.cells for row in rows)
    excused = {(r.notebook, reason) for r in rows for reason in r.excused.values()}
    notes = "".join(f"- {name}: {reason}\n" for name, reason in sorted(excused))
    failed = "".join(
        f"- {r.notebook}, {r.count} × {r.card}, code cell {number}: `{_first(error)}`\n"
        for r in rows
        for number, error in r.failed.items()
    )
    minutes = sum(row.seconds for row in rows) / 60
    parts = [
        f"{ran} of {cells} cells ran to their end in {len(rows)} rehearsals, which took "
        f"{minutes:.0f} minutes on a busy machine. "
        "[rehearsal.json](rehearsal.json) has each of them.\n"
    ]
    parts.append(f"\n{table(rows)}\n")
    if notes:
        parts.append(f"\nExcused, as a rehearsal has not what the cell speaks of:\n\n{notes}")
    if failed:
        parts.append(f"\nFailed:\n\n{failed}")
    return "".join(parts)


def write() -> None:
    """Write the page."""
    replace_all(PAGE.parent, {PAGE.name: written(PAGE.read_text(encoding="utf8"), read())})

"""The before/after tables of runs in a folder, in the order in which they ran."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tools.course import BUILD

if TYPE_CHECKING:
    from helpers.tables import Table


def of(notebook: str, folder: Path) -> list[Table]:
    """A notebook's tables: before beside after where they differ in one field, and all runs.

    The table of all runs is left out where it would show the same two.
    """
    from helpers import record, tables

    runs = dict(sorted(record.read(notebook, folder).items(), key=lambda item: item[1].date))
    if not runs:
        return []
    shown = []
    if {"before", "after"} <= set(runs):
        try:
            shown.append(tables.before_after(runs["before"], runs["after"]))
        except ValueError:  # another comparison than one field's: the table of all shows it
            pass
    if len(runs) > 2 or not shown:
        shown.append(tables.runs(runs))
    return shown


def every(folder: Path) -> dict[str, list[Table]]:
    """{notebook: its tables} of all runs in a folder."""
    notebooks = sorted({path.name.split(".", 1)[0] for path in folder.glob("*.json")})
    return {notebook: of(notebook, folder) for notebook in notebooks}


def show(paths: list[Path], folder: Path = BUILD / "runs") -> None:
    """Print the tables of these notebooks."""
    for path in paths:
        for table in of(path.stem, folder):
            print(f"\n{path.stem}\n{table}")

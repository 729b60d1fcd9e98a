"""Grade students' copies of notebooks: execute each, and let the checks say what is right."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import nbformat

from exercises.check import load_all
from helpers.tables import Table
from tools.course import NOTEBOOKS
from tools.course.execute import execute

ASKED = re.compile(r"^\s*check\(\s*[\"'](\d\d\.[1-9]\d*)[\"']", re.MULTILINE)


class Grade(NamedTuple):
    """An exercise in a student's notebook: points 1 or 0, and what was wrong."""

    file: str
    exercise: str
    points: int
    said: str


def grade(path: Path) -> list[Grade]:
    """The grades of one notebook, one per exercise of its chapter.

    An exercise that no cell checks has no points. The notebook is executed whole, with
    `TIGHT_FIT_GRADE=1`, so a cell that fails costs only its own points. It runs in this checkout,
    with the helpers and checks that are here, wherever the file lies. It is a program that somebody
    else wrote: grade where it can do no harm.
    Raises ValueError for a file that is no notebook or has no exercises.
    """
    try:
        cells = nbformat.read(path, as_version=4).cells
    except (OSError, nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise ValueError(
            f"{path.name} cannot be read as a notebook: give the student's .ipynb file."
        ) from error
    asked = [
        number
        for cell in cells
        if cell.cell_type == "code"
        for number in ASKED.findall(cell.source)
    ]
    if not asked:
        raise ValueError(f"{path.name} checks no exercise: its cells with check(...) are gone.")
    notebook, _ = execute(path, {"TIGHT_FIT_GRADE": "1"}, NOTEBOOKS, keep_going=True)
    said: dict[str, str] = {}
    for cell in notebook.cells:
        numbers = ASKED.findall(cell.source) if cell.cell_type == "code" else []
        errors = [output for output in cell.get("outputs", ()) if output.output_type == "error"]
        for number in numbers:
            said[number] = (
                f"{errors[0].ename}: {errors[0].evalue}".splitlines()[0] if errors else ""
            )
    chapters = {number[:2] for number in asked}
    return [
        Grade(path.name, number, int(said.get(number) == ""), said.get(number, "no cell checks it"))
        for number in load_all()
        if number[:2] in chapters
    ]


def command(files: Sequence[Path], to: Path | None = None) -> None:
    """Grade the files, print a table of points, and write every grade to a CSV file if asked."""
    grades = [earned for path in files for earned in grade(path)]
    if to is not None:
        with to.open("w", newline="", encoding="utf8") as file:
            writer = csv.writer(file)
            writer.writerows([Grade._fields, *grades])
    print(
        Table(
            [earned._asdict() for earned in grades],
            f"{sum(earned.points for earned in grades)} of {len(grades)} points",
        )
    )

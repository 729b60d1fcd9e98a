"""Grade students' copies of notebooks: their answers come out, and the checks run here.

Each submission runs in a fresh copy of the project, in processes of its own
(`tools.course.sandbox`), where `check` hands answers out. Whether they are right is found in this
process (`tools.course.judge`), which runs no line of a student. So nothing that a cell does to
`check`, to the environment, to modules or to files gives or takes a point.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import nbformat

from exercises.check import load_all
from helpers.tables import Table
from helpers.units import GIB
from tools.course import NOTEBOOKS, sandbox
from tools.course.judge import Judge
from tools.course.sandbox import Ended, Limits

ASKED = re.compile(r"\bcheck\(\s*(?:number\s*=\s*)?[\"'](\d\d\.[1-9]\d*)[\"']")
CHAPTER = re.compile(r"(\d\d)(?!\d)")
LARGEST = 100 * 2**20  # bytes of a notebook
NO_EXERCISE = "none"  # in place of a number, in the row of a notebook that could not be graded
FORMULA = tuple("=+-@\t\r")  # a spreadsheet takes a cell that begins so for a formula


class Grade(NamedTuple):
    """An exercise in a student's notebook: points 1 or 0, and what was wrong."""

    file: str
    exercise: str
    points: int
    said: str


def command(
    files: Sequence[Path],
    to: Path | None = None,
    limits: Limits | None = None,
    numbers: Sequence[str] = (),
) -> int:
    """Grade the files, print a table of points, and write every grade to a CSV file if asked.

    numbers  the exercises that count; without any, those of each notebook's chapter
    The CSV file is opened first and written row by row, so that an interruption loses one notebook.
    Gives 1 where a notebook could not be graded whole, else 0. Raises ValueError for an exercise
    that does not exist, OSError for the CSV file.
    """
    known = load_all()
    strange = [number for number in numbers if number not in known]
    if strange:
        raise ValueError(f"There is no exercise {strange[0]}: name some as 02.1.")
    if not sandbox.separate():
        print(
            "Submissions run as your account here and may read and change its files, because this "
            "machine allows no namespaces of their own: grade in a container.",
            file=sys.stderr,
        )
    named = names(files)
    grades: list[Grade] = []
    problems = 0
    with ExitStack() as stack:
        write: Callable[[Sequence[object]], object] = lambda row: None  # noqa: E731
        if to is not None:
            file = stack.enter_context(
                to.open("w", newline="", encoding="utf8", errors="backslashreplace")
            )
            write = csv.writer(file).writerow
            write(Grade._fields)
        for path, name in named.items():
            started = time.perf_counter()
            try:
                earned, problem = grade(path, name, limits or Limits(), numbers)
            except ValueError as error:
                earned, problem = [Grade(name, NO_EXERCISE, 0, str(error))], str(error)
            if problem:
                problems += 1
                print(printable(problem), file=sys.stderr)
            for one in earned:
                write([harmless(value) for value in one])
            if to is not None:
                file.flush()
            points = sum(one.points for one in earned)
            spent = time.perf_counter() - started
            print(
                f"{printable(name):40} {points} of {len(earned)} points {spent:6.1f} s", flush=True
            )
            grades += earned
    shown = [Grade(*(printable(value) for value in one))._asdict() for one in grades]
    print(Table(shown, f"{sum(one.points for one in grades)} of {len(grades)} points"))
    return int(problems > 0)


def names(files: Sequence[Path]) -> dict[Path, str]:
    """{file: the name under which it is graded}: its path below the folder that all have in common.

    A folder stands for the notebooks in it. Two students' `02.ipynb` are so told apart by their
    folders. A file that is named twice is graded once.
    """
    every: dict[Path, Path] = {}
    for given in files:
        inside = sorted(given.rglob("*.ipynb")) if given.is_dir() else [given]
        for path in inside:
            if ".ipynb_checkpoints" not in path.parts:
                every.setdefault(Path(os.path.abspath(path)), path)
    if not every:
        raise ValueError("There is no notebook to grade: name .ipynb files, or folders with some.")
    common = Path(os.path.commonpath([path.parent for path in every]))
    return {path: path.relative_to(common).as_posix() for path in every}


def grade(
    path: Path, name: str = "", limits: Limits | None = None, numbers: Sequence[str] = ()
) -> tuple[list[Grade], str | None]:
    """The grades of one notebook, one per exercise, and what is worth a teacher's look.

    name     under which it is graded; without one, the file's
    numbers  the exercises that count; without any, those of the chapter whose number the file's
             name begins with, or else of the one that most checks are of
    Raises ValueError, in one sentence that names the file, for one that is no notebook or checks no
    exercise that there is.
    """
    name, limits = name or path.name, limits or Limits()
    cells = code_cells(path, name)
    with sandbox.copy_of_project() as folder:
        judge = Judge(folder / "exercises" / "handout.sock")
        try:
            ended = sandbox.run(list(enumerate(cells, 1)), folder, limits, path.parent)
        finally:
            judge.close()
    how = how_it_ended(ended, limits)
    results = judge.results()
    counted = list(numbers) or of_its_chapter(path, cells, list(results))
    if not counted:
        why = judge.unknown[0] if judge.unknown else how and f"it {how}."
        raise ValueError(f"{name}: {why or 'no exercise is checked in it.'}")
    grades = []
    for number in counted:
        result = results.get(number)
        if result is not None and result.passed is not None:
            grades.append(Grade(name, number, int(result.passed), result.sentence))
        else:
            said = result.sentence if result else _why_not(number, cells, ended, how)
            grades.append(Grade(name, number, 0, said))
    if how:
        return grades, f"{name} {how}: what it had handed in before counts."
    return grades, f"{name}: {judge.unknown[0]}" if judge.unknown else None


def code_cells(path: Path, name: str) -> list[str]:
    """The sources of a notebook's code cells, without those that are tagged `skip-execution`.

    Raises ValueError, in one sentence that names the file, for what cannot be read as a notebook.
    """
    try:
        if not path.is_file():
            raise ValueError(f"{name} cannot be read: there is no such file.")
        if path.stat().st_size > LARGEST:
            raise ValueError(
                f"{name} has more than {LARGEST // 2**20} MiB: ask for it without its outputs."
            )
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        looks = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "another encoding"
        raise ValueError(
            f"{name} is not in UTF-8 but in {looks}: save it from Jupyter again."
        ) from error
    try:
        json.loads(text)
        notebook = nbformat.reads(text, as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        run = [cell for cell in code if "skip-execution" not in cell.metadata.get("tags", ())]
        return [str(cell.source) for cell in run]
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name} is damaged: its JSON breaks off at line {error.lineno}, column "
            f"{error.colno}; ask for it again."
        ) from error
    except Exception as error:  # nbformat raises what it meets in a file that is no notebook
        raise ValueError(
            f"{name} cannot be read as a notebook: give the student's .ipynb file."
        ) from error


def how_it_ended(ended: Ended, limits: Limits) -> str | None:
    """How a submission ended that did not run to its last cell, as the end of a sentence."""
    where = f" in code cell {ended.cell}" if ended.cell else ""
    if ended.why is None and ended.status == 0 and ended.cell is None:
        return None
    reasons = {
        "time": f"was ended after {limits.seconds:g} seconds",
        "memory": f"was ended for using more than {limits.memory / GIB:g} GiB of memory",
        "processes": f"was ended for running more than {limits.processes} processes",
        "disk": "was ended because the disk was nearly full",
        "stopped": "was stopped",
    }
    if ended.why:
        return reasons[ended.why] + where
    if ended.status is not None and ended.status < 0:
        return f"died of {_signal(-ended.status)}{where}"
    return f"ended by itself{where}, before its last cell"


def _signal(number: int) -> str:
    """Its name, as SIGKILL; real-time signals have none."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def of_its_chapter(path: Path, cells: Sequence[str], handed: Sequence[str]) -> list[str]:
    """The exercises of the chapter that a notebook is of: none where that cannot be known.

    These are the ones that the course's own notebook asks, the lesson or (where the file's name
    ends in `_lab`) its lab, and those of the chapter that this notebook asks or hands in.
    """
    known = load_all()
    chapters = {number[:2] for number in known}
    match = CHAPTER.match(path.name)
    if match and match[1] in chapters:
        chapter = match[1]
    else:
        asked = [*handed, *(number for cell in cells for number in ASKED.findall(cell))]
        seen = Counter(number[:2] for number in asked if number[:2] in chapters)
        if not seen:
            return []
        chapter = seen.most_common(1)[0][0]
    kind = NOTEBOOKS / "labs" if path.stem.endswith("_lab") else NOTEBOOKS
    courses = {number for own in kind.glob(f"{chapter}_*.ipynb") for number in _asked_in(own)}
    counted = courses.union(handed, *(ASKED.findall(cell) for cell in cells))
    return [number for number in known if number[:2] == chapter and number in counted]


@lru_cache
def _asked_in(path: Path) -> frozenset[str]:
    return frozenset(
        number for cell in code_cells(path, path.name) for number in ASKED.findall(cell)
    )


def _why_not(number: str, cells: Sequence[str], ended: Ended, how: str | None) -> str:
    for index, cell in enumerate(cells, 1):
        if number in ASKED.findall(cell) and index in ended.errors:
            return f"no answer came, as code cell {index} raised {ended.errors[index]}"
    return f"no answer came: the notebook {how}." if how else "no check of it was called."


def printable(value: object) -> object:
    """Text without control characters, which could move a terminal's cursor; others as they are."""
    if not isinstance(value, str):
        return value
    return "".join(letter if letter.isprintable() else " " for letter in value)


def harmless(value: object) -> object:
    """Text that a spreadsheet shows and never computes."""
    if not isinstance(value, str):
        return value
    shown = value if value.startswith(FORMULA) else str(printable(value))
    return f"'{printable(shown)}" if shown.startswith(FORMULA) else shown

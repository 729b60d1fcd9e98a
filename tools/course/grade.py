"""Grade students' copies of notebooks: their answers come out, and the checks run here.

Each submission runs in a fresh copy of the project, in processes of its own
(`tools.course.sandbox`), where `check` hands answers out. Whether they are right is found in this
process (`tools.course.judge`), which runs no line of a student. So nothing that a cell does to
`check`, to the environment, to modules or to files gives or takes a point.
"""

from __future__ import annotations

import csv
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from exercises.check import load_all
from helpers.tables import Table
from tight_fit.units import GIB
from tools.course import sandbox
from tools.course.judge import Judge
from tools.course.sandbox import Ended, Limits
from tools.course.submissions import ASKED, code_cells, names, of_its_chapter, without_notebook

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
    A student's folder without a notebook is reported as well. The CSV file is opened first and
    written row by row, so that an interruption loses one notebook.
    Gives 1 where a notebook could not be graded whole, else 0. Raises ValueError for an exercise
    that does not exist and for a CSV file that is a notebook, OSError for the CSV file.
    """
    known = load_all()
    strange = [number for number in numbers if number not in known]
    if strange:
        raise ValueError(f"There is no exercise {strange[0]}: name some as 02.1.")
    named = names(files)
    if to is not None and (to.suffix.lower() == ".ipynb" or to.resolve() in map(_whole, named)):
        raise ValueError(f"{to} is a notebook, which the grades would replace: name a .csv file.")
    if not sandbox.separate():
        print(
            "Submissions run as your account here and may read and change its files, because this "
            "machine allows no namespaces of their own: grade in a container.",
            file=sys.stderr,
        )
    hidden = [path if path.is_dir() else path.parent for path in map(_whole, files)]
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
        for name, said in without_notebook(files).items():
            problems += 1
            print(printable(said), file=sys.stderr)
            grades.append(Grade(name, NO_EXERCISE, 0, said))
            write([harmless(value) for value in grades[-1]])
        for path, name in named.items():
            started = time.perf_counter()
            try:
                earned, problem = grade(path, name, limits or Limits(), numbers, hidden)
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


def grade(
    path: Path,
    name: str = "",
    limits: Limits | None = None,
    numbers: Sequence[str] = (),
    hidden: Sequence[Path] = (),
) -> tuple[list[Grade], str | None]:
    """The grades of one notebook, one per exercise, and what is worth a teacher's look.

    name     under which it is graded; without one, the file's
    numbers  the exercises that count; without any, those of the chapter whose number the file's
             name begins with, or else of the one that most checks are of
    hidden   folders that the notebook should find empty, beside its own
    Raises ValueError, in one sentence that names the file, for one that is no notebook or checks no
    exercise that there is.
    """
    name, limits = name or path.name, limits or Limits()
    if path.is_symlink():  # by which one student could hand in the file of another
        raise ValueError(f"{name} is a link to another file: ask for the file itself.")
    cells = code_cells(path, name)
    with sandbox.copy_of_project() as folder:
        judge = Judge(folder / "exercises" / "handout.sock")
        try:
            ended = sandbox.run(list(enumerate(cells, 1)), folder, limits, [path.parent, *hidden])
        finally:
            judge.close()
    how = how_it_ended(ended, limits)
    results = judge.results()
    counted = list(dict.fromkeys(numbers)) or of_its_chapter(path, cells, list(results))
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


def _whole(path: Path) -> Path:
    """The path without links, from the root."""
    return Path(os.path.realpath(path))


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

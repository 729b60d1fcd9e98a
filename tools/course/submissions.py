"""Students' files: which notebooks there are, under which names, and the code cells of each."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import nbformat

from exercises.check import load_all
from tools.course import NOTEBOOKS

ASKED = re.compile(r"\bcheck\(\s*(?:number\s*=\s*)?[\"'](\d\d\.[1-9]\d*)[\"']")
CHAPTER = re.compile(r"(\d\d)(?!\d)")
# What file managers, browsers and Jupyter add to the name of a copy: "x_lab (1)", "x_lab-Copy1".
LAB = re.compile(r"_lab(?:[ ._-]*(?:\(\d+\)|copy ?\d*|\d+))*$", re.IGNORECASE)
LARGEST = 100 * 2**20  # bytes of a notebook


def names(files: Sequence[Path]) -> dict[Path, str]:
    """{file: the name under which it is graded}: its path below the folder that all have in common.

    A folder stands for the notebooks in it. Two students' `02.ipynb` are so told apart by their
    folders. A file that is named twice is graded once. Raises ValueError where there is none.
    """
    every, empty = _found(files)
    if not every:
        raise ValueError("There is no notebook to grade: name .ipynb files, or folders with some.")
    common = os.path.commonpath([*(path.parent for path in every), *empty])
    return {path: path.relative_to(common).as_posix() for path in every}


def without_notebook(files: Sequence[Path]) -> dict[str, str]:
    """{name of a student's folder in which there is no notebook: the sentence that says so}.

    A student's folder is one that lies in a given folder which has no notebooks itself.
    """
    every, empty = _found(files)
    common = os.path.commonpath([*(path.parent for path in every), *empty])
    return {
        (name := path.relative_to(common).as_posix()): f"{name} is a link to a folder: name that."
        if path.is_symlink()
        else f"{name} holds no notebook: ask for a file whose name ends in .ipynb."
        for path in empty
    }


def _found(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The notebooks, and the students' folders without one; absolute paths, each once."""
    every: dict[Path, None] = {}
    empty: dict[Path, None] = {}
    for given in files:
        if not given.is_dir():
            every[Path(os.path.abspath(given))] = None
            continue
        top = Path(os.path.abspath(given))
        inside = [
            path
            for path in sorted(top.rglob("*"))
            if path.suffix.lower() == ".ipynb" and ".ipynb_checkpoints" not in path.parts
        ]
        every.update(dict.fromkeys(inside))
        if not any(path.parent == top for path in inside):
            empty.update(
                (child, None)
                for child in sorted(top.iterdir())
                if child.is_dir() and not child.name.startswith((".", "__"))
                if not any(path.is_relative_to(child) for path in inside)
            )
    return list(every), list(empty)


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
        values = _without_outputs(json.loads(text))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cells of old notebooks have no ids
            notebook = nbformat.reads(json.dumps(values), as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        run = [cell for cell in code if "skip-execution" not in (cell.metadata.get("tags") or ())]
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


def _without_outputs(notebook: Any) -> Any:
    """The notebook without what its cells showed, which may be millions of values."""
    for cell in notebook.get("cells", ()) if isinstance(notebook, dict) else ():
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            cell["outputs"] = []
    return notebook


def of_its_chapter(path: Path, cells: Sequence[str], handed: Sequence[str]) -> list[str]:
    """The exercises of the chapter that a notebook is of: none where that cannot be known.

    These are the ones that the course's own notebook asks, the lesson or (where the file's name
    ends in `_lab`) its lab, and those of the chapter that this notebook asks or hands in. Where
    more follows the number than `_`, as in a date, the notebook must have an exercise of it.
    """
    known = load_all()
    chapters = {number[:2] for number in known}
    asked = [*handed, *(number for cell in cells for number in ASKED.findall(cell))]
    seen = Counter(number[:2] for number in asked if number[:2] in chapters)
    match = CHAPTER.match(path.name)
    sure = re.match(r"\d\d(_|$)", path.stem) or not seen  # as the course names its own
    if match and match[1] in chapters and (sure or match[1] in seen):
        chapter = match[1]
    elif seen:
        chapter = seen.most_common(1)[0][0]
    else:
        return []
    kind = NOTEBOOKS / "labs" if LAB.search(path.stem) else NOTEBOOKS
    courses = {number for own in kind.glob(f"{chapter}_*.ipynb") for number in _asked_in(own)}
    counted = courses.union(asked)
    return [number for number in known if number[:2] == chapter and number in counted]


@lru_cache
def _asked_in(path: Path) -> frozenset[str]:
    return frozenset(
        number for cell in code_cells(path, path.name) for number in ASKED.findall(cell)
    )

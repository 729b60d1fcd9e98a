"""Which notebooks there are, and how it is said that one failed.

It imports nothing of Jupyter, so that `make record` can measure steps where that is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tools.course import NOTEBOOKS


class Failed(RuntimeError):
    """A notebook did not run to its end; the message says where and why."""


class OutOfTime(Failed):
    """The time that was given for a notebook was over before its end."""


def every_notebook(folder: Path = NOTEBOOKS) -> list[Path]:
    """Lessons and labs in the course's order, each lesson before its lab."""
    found = [*folder.glob("[0-9][0-9]_*.ipynb"), *(folder / "labs").glob("[0-9][0-9]_*.ipynb")]
    return sorted(found, key=lambda path: (path.name[:2], path.parent != folder, path.name))


def chosen(numbers: Iterable[str] = (), folder: Path = NOTEBOOKS, labs: bool = False) -> list[Path]:
    """Notebooks by their numbers ("2", "02") or names, in the course's order.

    Without any number these are all lessons. Labs are taken by their names, or with `labs` like
    lessons. Raises ValueError for a number that no notebook has, and where there is no notebook.
    """
    every = every_notebook(folder)
    if not every:
        raise ValueError(f"There is no notebook in {folder.name}/.")
    wanted = set()
    for word in numbers:
        matching = [path for path in every if path.stem == Path(word).stem] or [
            path
            for path in every
            if word.strip() and path.name[:2] == word.zfill(2) and (labs or path.parent == folder)
        ]
        if not matching:
            numbers_there = ", ".join(path.name[:2] for path in every if path.parent == folder)
            raise ValueError(f"There is no notebook {word!r}: choose from {numbers_there}.")
        wanted.update(matching)
    if not wanted:
        wanted = {path for path in every if labs or path.parent == folder}
    return [path for path in every if path in wanted]

"""A lesson as an assignment of nbgrader: answers to fill in, and checks that give points.

    python -m tools.course assign 02 --out source/week1

Each exercise becomes two cells, as nbgrader's documentation has them: one of kind "autograded
answer", between whose marks a teacher may write a solution, and a locked one of kind "autograder
tests" that calls `check` and gives a point.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tools.course import clean

SCHEMA = 3  # of nbgrader's metadata
CALL = re.compile(r'^check\("(\d\d\.\d+)", .*\)\s*$', re.M)
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
# A wrong answer raises AssertionError where this is set, for which nbgrader gives no point.
GRADED = 'import os; os.environ["TIGHT_FIT_GRADE"] = "1"\n'


def write(notebooks: list[Path], folder: Path) -> list[Path]:
    """Write assignments into a folder, and return their paths.

    Raises FileExistsError for one that is there, since a teacher may have written into it.
    """
    targets = {path: folder / path.name for path in notebooks}
    for target in targets.values():
        if target.exists():
            raise FileExistsError(f"{target} is there already: name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, target in targets.items():
        nbformat.write(assignment(nbformat.read(path, as_version=4)), target)
    return list(targets.values())


def assignment(notebook: NotebookNode) -> NotebookNode:
    """A notebook without outputs, its exercises cut into answers and checks."""
    made = clean.clean(notebook)
    cells: list[NotebookNode] = []
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        call = CALL.search(cell.source) if cell.cell_type == "code" else None
        if call is None:
            cells.append(cell)
            continue
        number = call[1].replace(".", "-")
        answer, check = cell.source[: call.start()].rstrip(), cell.source[call.start() :]
        cells.append(_cell(_marked(answer), f"answer-{number}", solution=True))
        cells.append(_cell(GRADED + check, f"check-{number}", grade=True, points=1))
    made.cells = cells
    return made


def _marked(answer: str) -> str:
    """An answer with the marks of a solution: in the body of a function, else at its end."""
    line = "    ..."  # stands where the body of a function is to be written
    marks = f"{BEGIN}\n...\n{END}"
    if answer.endswith(line):
        body = "\n".join(f"    {each}" for each in marks.split("\n"))
        return answer.removesuffix(line) + body
    return f"{answer}\n{marks}"


def _cell(source: str, name: str, grade: bool = False, solution: bool = False, **more: int):
    facts = {"grade": grade, "grade_id": name, "locked": grade, "schema_version": SCHEMA}
    facts |= {"solution": solution, "task": False, **more}
    return new_code_cell(source, id=name, metadata={"nbgrader": facts})

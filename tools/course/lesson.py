"""`make lesson N=28 TITLE="..."`: a new lesson, its lab and its exercises, as stubs that fail."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools.course import NOTEBOOKS
from tools.course.opening import FOLDED, first_cell

STUBS = Path(__file__).with_name("stubs")
LESSON = (STUBS / "lesson.md").read_text(encoding="utf8")
# What every lesson has, in this order, and what its decision card names.
HEADINGS = tuple(re.findall(r"^## (.+)$", LESSON, re.MULTILINE))
CARD = ("Use when", "Start from", "Watch")
STILL = "STILL TO BE WRITTEN"
BETWEEN = "\n+++\n"  # cells of a stub; one that begins with CODE is of code
CODE = "%"
FIRST = "%first cell"


def write(number: str, title: str, root: Path = NOTEBOOKS.parent) -> list[Path]:
    """Write the stubs of a lesson; the paths of the four files.

    Each fails in `make test` until it is written: exercises have no right answer, and the notebooks
    no drawing, no training and no reference. Raises ValueError for what is no number or no title,
    and FileExistsError where the number is taken: nothing is written then.
    """
    if not re.fullmatch(r"[0-9]{2}", number):
        raise ValueError(f"N={number!r} is no number of a lesson: write two digits, such as N=28.")
    title = " ".join(title.split())
    words = re.findall(r"[a-z0-9]+", title.lower())
    if not words or len(title) > 60 or re.search(r'["\\{}]', title):
        raise ValueError('TITLE names the lesson in at most 60 plain characters: TITLE="8 bits".')
    name = f"{number}_{'_'.join(words)}"
    said = {"number": number, "title": title, "name": name, "still": STILL}
    stubs = {
        f"notebooks/{name}.ipynb": "lesson.md",
        f"notebooks/labs/{name}_lab.ipynb": "lab.md",
        f"exercises/nb{number}.py": "exercises.txt",
        f"tests/exercises/solutions/nb{number}.py": "solutions.txt",
    }
    texts = {
        path: (STUBS / stub).read_text(encoding="utf8").format(**said)
        for path, stub in stubs.items()
    }
    taken = [*root.glob(f"notebooks/{number}_*.ipynb"), *(root / path for path in texts)]
    for path in taken:
        if path.exists():
            raise FileExistsError(f"{path.relative_to(root)} is there: choose another number.")
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        made = _notebook(text) if path.endswith(".ipynb") else text
        (root / path).write_text(made, encoding="utf8")
    return [root / path for path in texts]


def _notebook(text: str) -> str:
    """The notebook of a stub, as its file has it."""
    cells = []
    for place, source in enumerate(text.removesuffix("\n").split(BETWEEN)):
        if source == FIRST:
            cells.append(new_code_cell(first_cell(), metadata=FOLDED))
        elif source.startswith(CODE):
            cells.append(new_code_cell(source.removeprefix(CODE)))
        else:
            cells.append(new_markdown_cell(source))
        cells[-1].id = f"c{place:02}"
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": spec, "language_info": {"name": "python"}}
    return nbformat.writes(new_notebook(cells=cells, metadata=metadata)) + "\n"

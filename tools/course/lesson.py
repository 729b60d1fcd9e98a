"""`make lesson N=28 TITLE="..."`: a new lesson, its lab and its exercises, as stubs that fail."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools.course import NOTEBOOKS
from tools.course.opening import first_cell

# What every lesson has, in this order, and what its decision card names.
HEADINGS = (
    "The problem",
    "The idea",
    "Before and after",
    "The models you came for",
    "In your own code",
    "When it does not help",
    "Decision card",
    "Exercises",
    "References",
)
CARD = ("Use when", "Start from", "Watch")
STILL = "STILL TO BE WRITTEN"
OPENING = """# {number} {title}

**In one line:** {still}.

| | |
|---|---|
| **Buys** | {still} |
| **Not when** | {still} |

```python
{still}
```

**You will be able to** {still}.

{still} minutes to read and run, {still} for the exercises. The
[lab](labs/{name}_lab.ipynb) is optional; words are in the [glossary](../docs/glossary.md)."""
EXERCISES = '''"""Exercises of notebook {number}: {title}."""

from __future__ import annotations

from exercises.check import exercise


@exercise("{number}.1", hints=["{still}", "{still}"], why="{still}")
def _(answer):
    raise AssertionError("{still}")


@exercise("{number}.2", hints=["{still}", "{still}"], why="{still}")
def _(answer):
    raise AssertionError("{still}")


@exercise("{number}.3", hints=["{still}", "{still}"], why="{still}")
def _(answer):
    raise AssertionError("{still}")
'''
SOLUTIONS = '''"""Answers to the exercises of notebook {number}, right and wrong."""

RIGHT = {{"{number}.1": None, "{number}.2": None, "{number}.3": None}}
WRONG = {{"{number}.1": [], "{number}.2": [], "{number}.3": []}}
'''


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
    texts = {
        f"notebooks/{name}.ipynb": _text(_lesson(said)),
        f"notebooks/labs/{name}_lab.ipynb": _text(_lab(said)),
        f"exercises/nb{number}.py": EXERCISES.format(**said),
        f"tests/exercises/solutions/nb{number}.py": SOLUTIONS.format(**said),
    }
    taken = [*root.glob(f"notebooks/{number}_*.ipynb"), *(root / path for path in texts)]
    for path in taken:
        if path.exists():
            raise FileExistsError(f"{path.relative_to(root)} is there: choose another number.")
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf8")
    return [root / path for path in texts]


def _lesson(said: dict[str, str]) -> nbformat.NotebookNode:
    cells = [new_markdown_cell(OPENING.format(**said)), _first()]
    cells.append(new_code_cell("from exercises.check import check"))
    for heading in HEADINGS:
        cells.append(new_markdown_cell(f"## {heading}\n\n{STILL}"))
        if heading == "Decision card":
            rows = "\n".join(f"| **{part}** | {STILL} |" for part in CARD)
            cells[-1] = new_markdown_cell(f"## {heading}\n\n| | |\n|---|---|\n{rows}")
        if heading == "Exercises":
            for count in (1, 2, 3):
                cells.append(new_markdown_cell(f"**{count}.** {STILL}"))
                cells.append(new_code_cell(f'check("{said["number"]}.{count}", None)'))
            cells.append(new_markdown_cell(f"**Open task.** {STILL}"))
    return new_notebook(cells=cells)


def _lab(said: dict[str, str]) -> nbformat.NotebookNode:
    head = (
        f"# {said['number']} {said['title']}: lab\n\nThis lab is **optional**. It checks what the "
        f"lesson [{said['number']}](../{said['name']}.ipynb) says.\n\n- **{STILL}**: {STILL}"
    )
    return new_notebook(cells=[new_markdown_cell(head), _first()])


def _first() -> nbformat.NotebookNode:
    folded = {"cellView": "form", "_kg_hide-input": True, "jupyter": {"source_hidden": True}}
    return new_code_cell(first_cell(), metadata=folded)


def _text(notebook: nbformat.NotebookNode) -> str:
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": spec, "language_info": {"name": "python"}}
    for place, cell in enumerate(notebook.cells):
        cell.id = f"c{place:02}"
    return nbformat.writes(notebook) + "\n"

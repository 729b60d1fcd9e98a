"""Code cells of lessons, for tests that run what a page gives its reader."""

import json

import nbformat

from tests.lessons.rules import markdown
from tests.script import run
from tools.course import NOTEBOOKS


def the_cell(number: str, words: str) -> str:
    """The source of the one code cell of a lesson, such as "16", that has `words` in it."""
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    nb = nbformat.read(path, as_version=4)
    (found,) = (c.source for c in nb.cells if c.cell_type == "code" and words in c.source)
    return found


def markdown_of(number: str) -> str:
    """All text of a lesson, its Markdown cells joined by blank lines."""
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    return markdown(nbformat.read(path, as_version=4))


def own_code(number: str, wanted: tuple[str, ...], *changes: tuple[str, str]) -> str:
    """The cells of the lesson that have one of the `wanted` words in them, in order.

    Each of the changes, (what stands there, what replaces it), must be found once.
    """
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    cells = [
        cell.source
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code" and any(word in cell.source for word in wanted)
    ]
    assert len(cells) >= len(wanted), f"a cell of {wanted} is gone from lesson {number}"
    kept = [line for cell in cells for line in cell.splitlines() if not line.startswith("needs(")]
    text = "\n".join(kept) + "\n"
    for old, new in changes:
        assert text.count(old) == 1, f"lesson {number} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    return text


def with_full(config: dict, text: str) -> str:
    """The text as a program that has a configuration's fields as FULL."""
    return f"import json\nimport torch\nFULL = json.loads({json.dumps(config)!r})\n{text}"


def facts_of(folder, text: str, gpu: str, **wanted) -> dict:
    """The facts of a plan of this text as a reader's program in the folder."""
    path = folder / "train.py"
    path.write_text(text, encoding="utf8")
    return run(str(path), gpu=gpu, seconds=300, **wanted)

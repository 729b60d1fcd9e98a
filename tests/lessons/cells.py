"""Code cells of lessons, for tests that run what a page gives its reader."""

import nbformat

from tests.lessons.rules import markdown
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

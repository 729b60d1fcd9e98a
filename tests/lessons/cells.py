"""Code cells of lessons, for tests that run what a page gives its reader."""

import nbformat

from tools.course import NOTEBOOKS


def the_cell(number: str, words: str) -> str:
    """The source of the one code cell of a lesson, such as "16", that has `words` in it."""
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    nb = nbformat.read(path, as_version=4)
    (found,) = (c.source for c in nb.cells if c.cell_type == "code" and words in c.source)
    return found

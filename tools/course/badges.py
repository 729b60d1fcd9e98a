"""The repository's address, from pyproject.toml into notebooks and README."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nbformat

from helpers import notebook_setup
from helpers.files import replace_all
from tools.course import NOTEBOOKS, ROOT
from tools.course.notebooks import every_notebook

MARK = "<!-- badges -->"  # ends the badges' line of a notebook
README = ROOT / "README.md"
UNPUBLISHED = (
    "The project has no public address yet: unpack your copy, and open a terminal in its folder."
)
COLAB = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{})"
)
KAGGLE = (
    "[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
    "(https://kaggle.com/kernels/welcome?src={})"
)


def badges(notebook: str, repository: str) -> str:
    """Links that open a notebook on Colab and Kaggle.

    notebook    its file name, as "00_start_here.ipynb"
    repository  its address on GitHub
    """
    folder = "notebooks/labs" if notebook.endswith("_lab.ipynb") else "notebooks"
    path = f"blob/main/{folder}/{notebook}"
    owner = repository.removeprefix("https://github.com/")
    return f"{COLAB.format(f'{owner}/{path}')} {KAGGLE.format(f'{repository}/{path}')}"


def notebook(path: Path, repository: str) -> str:
    """A notebook's text as it should be: badges under its title, the first cell folded."""
    node = nbformat.read(path, as_version=4)
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = _under_title(cell.source, f"{badges(path.name, repository)} {MARK}")
            break
    first = next((cell for cell in node.cells if cell.cell_type == "code"), None)
    if first is None or "notebook_setup.setup()" not in first.source:
        first = nbformat.v4.new_code_cell(id="start")
        node.cells.insert(min(1, len(node.cells)), first)
    first.source = notebook_setup.first_cell()
    first.metadata.update(notebook_setup.FOLDED)
    return nbformat.writes(node).rstrip("\n") + "\n"


def _under_title(source: str, badge_line: str) -> str:
    """The cell's source with its line of badges replaced, or put under its title."""
    lines = source.split("\n")
    for number, line in enumerate(lines):
        if line.rstrip().endswith(MARK):
            lines[number] = badge_line
            return "\n".join(lines)
    title = next((number for number, line in enumerate(lines) if line.startswith("# ")), -1)
    rest = lines[title + 1 :]
    gap = [""] if rest and rest[0].strip() else []
    return "\n".join([*lines[: title + 1], "", badge_line, *gap, *rest]).strip("\n")


def readme(text: str, repository: str, first: str, published: bool = True) -> str:
    """README's text, its <!-- badges --> and <!-- clone --> blocks written anew.

    published  whether the project is at its address; if not, README says so and links nowhere
    """
    clone = f"```sh\ngit clone {repository}\ncd {repository.rsplit('/', 1)[-1]}\n```"
    line = badges(first, repository)
    if not published:
        line, clone = "", UNPUBLISHED
    for name, content in (("badges", line), ("clone", clone)):
        text = with_block(text, name, content)
    return text


def is_published() -> bool:
    """Whether pyproject.toml says that the project is at its address ([tool.tight-fit])."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return bool(tomllib.load(file)["tool"]["tight-fit"]["published"])


def with_block(text: str, name: str, content: str) -> str:
    """The text with `content` between `<!-- name -->` and `<!-- /name -->`, if it has these."""
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = rf"<!-- {name} -->\n.*?<!-- /{name} -->"
    return re.sub(pattern, lambda _: block, text, flags=re.DOTALL)


def stale(folder: Path = NOTEBOOKS, page: Path = README) -> dict[Path, str]:
    """{file: the text it should have} of notebooks and README that differ from it."""
    repository = notebook_setup.repository()
    wanted = {path: notebook(path, repository) for path in every_notebook(folder)}
    if page.is_file():
        first = min((path.name for path in wanted), default="00_start_here.ipynb")
        text = page.read_text(encoding="utf8")
        wanted[page] = readme(text, repository, first, is_published())
    return {path: text for path, text in wanted.items() if text != path.read_text(encoding="utf8")}


def command(check: bool) -> int:
    """Write what is stale and return 0; with `check` only name it, and return 1 if there is any."""
    files = stale()
    for path, text in files.items():
        print(f"{path.relative_to(ROOT)}: {'stale, run `make badges`' if check else 'written'}")
        if not check:
            replace_all(path.parent, {path.name: text})
    if not files:
        print(f"All badges name {notebook_setup.repository()}.")
    return int(check and bool(files))

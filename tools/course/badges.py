"""The project's address, from pyproject.toml into notebooks, README and CITATION.cff.

While it is empty there is no badge, nothing is fetched, and README says how to begin without it.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from benchmarks.pages import with_block
from tight_fit.files import replace_all
from tools.course import NOTEBOOKS, ROOT, opening
from tools.course.notebooks import every_notebook

MARK = "<!-- badges -->"  # ends the badges' line of a notebook
README = ROOT / "README.md"
CITATION = ROOT / "CITATION.cff"
CITED = re.compile(r"^repository-code: .*\n", re.MULTILINE)
UNPUBLISHED = (
    "The project has no public address yet: unpack your copy, and open a terminal in its folder."
)
# {where a notebook opens: (the picture of its badge, the address before the notebook's own)}
PLACES = {
    "Colab": (
        "https://colab.research.google.com/assets/colab-badge.svg",
        "https://colab.research.google.com/github/",
    ),
    "Kaggle": (
        "https://kaggle.com/static/images/open-in-kaggle.svg",
        "https://kaggle.com/kernels/welcome?src=https://github.com/",
    ),
}


def addresses(notebook: str, repository: str) -> dict[str, str]:
    """{where it opens: the address} of a notebook.

    notebook    its path in the repository, as "notebooks/00_start_here.ipynb"
    repository  the project's address on GitHub
    """
    own = f"{repository.removeprefix('https://github.com/')}/blob/main/{notebook}"
    return {place: before + own for place, (_, before) in PLACES.items()}


def badges(notebook: str, repository: str) -> str:
    """Links that open a notebook on Colab and Kaggle.

    notebook    its file name, as "00_start_here.ipynb"
    repository  its address on GitHub
    """
    folder = "notebooks/labs" if notebook.endswith("_lab.ipynb") else "notebooks"
    ways = addresses(f"{folder}/{notebook}", repository).items()
    return " ".join(f"[![Open in {place}]({PLACES[place][0]})]({way})" for place, way in ways)


def notebook(path: Path, repository: str) -> str:
    """A notebook's text as it should be: badges under its title, the first cell folded.

    repository  the project's address; "" for none, which leaves no badge
    """
    node = nbformat.read(path, as_version=4)
    line = f"{badges(path.name, repository)} {MARK}" if repository else ""
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = _under_title(cell.source, line)
            break
    first = next((cell for cell in node.cells if cell.cell_type == "code"), None)
    if first is None or "helpers.setup" not in first.source:
        first = nbformat.v4.new_code_cell(id="start")
        node.cells.insert(min(1, len(node.cells)), first)
    first.source = opening.first_cell(repository)
    first.metadata.update(opening.FOLDED)
    return nbformat.writes(node).rstrip("\n") + "\n"


def _under_title(source: str, badge_line: str) -> str:
    """The cell's source with this line of badges under its title, in place of an older one.

    An empty line takes the older one out.
    """
    kept = re.sub(rf"\n*^.*{re.escape(MARK)}[ ]*$", "", source, flags=re.MULTILINE)
    if not badge_line:
        return kept
    lines = kept.split("\n")
    title = next((number for number, line in enumerate(lines) if line.startswith("# ")), -1)
    rest = lines[title + 1 :]
    gap = [""] if rest and rest[0].strip() else []
    return "\n".join([*lines[: title + 1], "", badge_line, *gap, *rest]).strip("\n")


def readme(text: str, repository: str, first: str) -> str:
    """README's text, its <!-- badges --> and <!-- clone --> blocks written anew.

    repository  the project's address; "" for none: README then says so and links nowhere
    first       the file name of the notebook that the badges open
    """
    line, clone = "", UNPUBLISHED
    if repository:
        line = badges(first, repository)
        clone = f"```sh\ngit clone {repository}\ncd {repository.rsplit('/', 1)[-1]}\n```"
    for name, content in (("badges", line), ("clone", clone)):
        text = with_block(text, name, content)
    return text


def citation(text: str, repository: str) -> str:
    """The text of CITATION.cff with the project's address, or without one where it is ""."""
    text = CITED.sub("", text)
    line = f"repository-code: {repository}\n" if repository else ""
    return text.replace("license: ", f"{line}license: ", 1)


def stale(
    folder: Path = NOTEBOOKS,
    page: Path = README,
    cited: Path = CITATION,
    repository: str | None = None,
) -> dict[Path, str]:
    """{file: the text it should have} of notebooks, README and CITATION.cff that differ from it.

    repository  the project's address; None takes pyproject.toml's
    """
    address = opening.repository() if repository is None else repository
    wanted = {path: notebook(path, address) for path in every_notebook(folder)}
    if page.is_file():
        first = min((path.name for path in wanted), default="00_start_here.ipynb")
        wanted[page] = readme(page.read_text(encoding="utf8"), address, first)
    if cited.is_file():
        wanted[cited] = citation(cited.read_text(encoding="utf8"), address)
    return {path: text for path, text in wanted.items() if text != path.read_text(encoding="utf8")}


def command(check: bool) -> int:
    """Write what is stale and return 0; with `check` only name it, and return 1 if there is any."""
    files = stale()
    for path, text in files.items():
        print(f"{path.relative_to(ROOT)}: {'stale, run `make badges`' if check else 'written'}")
        if not check:
            replace_all(path.parent, {path.name: text})
    if not files:
        address = opening.repository()
        print(f"All badges name {address}." if address else "No address, and so no badges.")
    return int(check and bool(files))

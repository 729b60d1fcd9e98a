"""What Sphinx reads: notebooks and pages, with links that work on a site.

A lesson's number in parentheses, "(02)", and an issue, "huggingface/peft#2171", become links. Links
to files of the repository that are no pages lead to copies of these files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from tools.course import ROOT, badges
from tools.course.notebooks import every_notebook
from tools.site.cards import cards

LONG = 25  # lines of code; a longer cell is folded
CODE = re.compile(r"(```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|\[[^\]]*\]\([^)]*\)|<[^>]+>)", re.S)
LESSON = re.compile(r"\((\d\d)((?:, \d\d)*)\)")
ISSUE = re.compile(r"(?<![\w/])([A-Za-z][\w.-]*/[\w.-]+)#(\d+)\b")
LINK = re.compile(r"\[((?:[^\[\]]|`[^`]*`)*)\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)\s]*)?\)")
TABLE = re.compile(r"<!-- notebooks -->.*?<!-- /notebooks -->\n?", re.S)  # of docs/lessons.md
GENERATED = re.compile(r"<!-- /?[\w-]+ -->\n?")
PICTURES = ("image/svg+xml", "image/png")
FILES = "files"  # folder of the site that holds copies of files


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """The text with a change made outside of code, formulas, links and HTML."""
    parts = CODE.split(text)
    return "".join(part if place % 2 else change(part) for place, part in enumerate(parts))


def linked(text: str, page: Path, lessons: dict[str, Path]) -> str:
    """A page's Markdown with lessons' numbers and issues as links.

    page     its path in the repository, relative to the root
    lessons  {number: the lesson's path relative to the root}
    """
    up = "../" * (len(page.parts) - 1)

    def lesson(match: re.Match) -> str:
        numbers = [match[1], *match[2].replace(",", " ").split()]
        if any(number not in lessons for number in numbers):
            return match[0]
        each = [f"[{number}]({up}{lessons[number].as_posix()})" for number in numbers]
        return f"({', '.join(each)})"

    def change(part: str) -> str:
        part = LESSON.sub(lesson, part)
        return ISSUE.sub(r"[\1#\2](https://github.com/\1/issues/\2)", part)

    return in_prose(text, change)


def described(cell: NotebookNode) -> list[str]:
    """The alternative texts of a cell's pictures; a picture without one is said to be the code's.

    They are in the metadata of an output, or are its text form.
    """
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if kind := next((kind for kind in PICTURES if kind in data), None):
            alt = output.metadata.get(kind, {}).get("alt") or data.get("text/plain", "")
            texts.append("A figure made by the code above." if alt.startswith("<") else alt)
    return texts


class Sources:
    """Writes the sources of the site.

    folder  where to; `files` are those of the repository that pages link to
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.notebooks = every_notebook()
        self.docs = sorted((ROOT / "docs").glob("*.md"))
        root = ROOT
        others = [root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md"]
        self.pages = {path.relative_to(root) for path in (*self.notebooks, *self.docs, *others)}
        self.files: set[Path] = set()
        self.lessons = {
            path.name[:2]: path.relative_to(root)
            for path in self.notebooks
            if path.parent.name == "notebooks"
        }

    def write(self) -> None:
        """Write all pages but the index."""
        for page in sorted(self.pages):
            target = self.folder / page
            target.parent.mkdir(parents=True, exist_ok=True)
            if page.suffix == ".ipynb":
                nbformat.write(self.notebook(page), target)
            else:
                text = (ROOT / page).read_text(encoding="utf8")
                if page == Path("docs/lessons.md"):
                    shown = cards([ROOT / path for path in self.lessons.values()])
                    text = shown.join(TABLE.split(text, 1))
                text = GENERATED.sub("", text)
                target.write_text(self._links(linked(text, page, self.lessons), page), "utf8")
        for picture in (ROOT / "docs").glob("*.png"):
            (self.folder / "docs" / picture.name).write_bytes(picture.read_bytes())

    def notebook(self, page: Path) -> NotebookNode:
        """A notebook as the site shows it: links, folded set-up, no badges that load pictures."""
        node = nbformat.read(ROOT / page, as_version=4)
        first = True
        for cell in node.cells:
            if cell.cell_type == "markdown":
                kept = [line for line in cell.source.split("\n") if badges.MARK not in line]
                text = linked("\n".join(kept), page, self.lessons)
                cell.source = self._links(text, page)
            elif cell.cell_type == "code":
                long = cell.source.count("\n") + 1 > LONG
                if first or long:
                    cell.metadata.tags = [*cell.metadata.get("tags", []), "hide-input"]
                first = False
                if texts := described(cell):
                    cell.metadata.mystnb = {"image": {"alt": " ".join(texts)}}
        node.cells[0].source += f"\n\n{self._open_in(page)}"
        return node

    def _open_in(self, page: Path) -> str:
        self.files.add(page)
        up = "../" * (len(page.parts) - 1)
        ways = [f'<a href="{up}{FILES}/{page.as_posix()}" download>Download this notebook</a>']
        if owner := badges.opening.repository():
            ways += [
                f'<a href="{way}">Open in {place}</a>'
                for place, way in badges.addresses(page.as_posix(), owner).items()
            ]
        return " · ".join(ways)

    def _links(self, text: str, page: Path) -> str:
        """The text with links to files that are no pages leading to copies."""

        def change(match: re.Match) -> str:
            target = (ROOT / page.parent / match[2]).resolve()
            if not target.is_relative_to(ROOT) or not target.exists():
                return match[0]
            inside = target.relative_to(ROOT)
            if inside in self.pages or inside.suffix == ".png":
                return match[0]
            up = "../" * (len(page.parts) - 1)
            if target.is_dir():
                inside = inside / "__init__.py"
                if not (ROOT / inside).exists():
                    inside = target.relative_to(ROOT) / "README.md"
                if not (ROOT / inside).exists():
                    return f"[{match[1]}]({up}docs/architecture.md)"
            self.files.add(inside)
            return f'<a href="{up}{FILES}/{inside.as_posix()}.txt">{match[1]}</a>'

        return LINK.sub(change, text)

    def copy_files(self, site: Path) -> None:
        """Copy the files that pages link to; those that are read in a browser end with .txt."""
        for file in self.files:
            name = file.name if file.suffix == ".ipynb" else f"{file.name}.txt"
            target = site / FILES / file.parent / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / file).read_bytes())

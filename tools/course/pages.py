"""HTML pages of executed notebooks, and an index of them.

A page is one file with its figures and its style in it. Only formulas need the network: MathJax
typesets them, and without it they are readable as LaTeX.
"""

from __future__ import annotations

import html as escape
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from nbformat import NotebookNode

from helpers.files import replace_all
from tools.course import NOTEBOOKS

if TYPE_CHECKING:
    from helpers.tables import Table

NEIGHBOUR = re.compile(r'href="(?:\./)?(\d\d_\w+)\.ipynb')  # a link from one notebook to another
SCRIPT = re.compile(r'<script src="(?:require)?"></script>')
STYLE = """body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
  color: #222 }
table { border-collapse: collapse; font-size: 14px; margin: .5em 0 }
td, th { padding: .2em .8em; text-align: right } th { border-bottom: 1px solid #999 }
td:first-child, th:first-child { text-align: left } .small { color: #666 }"""


def html(notebook: NotebookNode) -> str:
    """One self-contained page."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name="lab", embed_images=True, require_js_url="", mermaid_js_url=""
    )
    exporter.log.setLevel("ERROR")
    notebook.metadata.title = title(notebook)
    page, _ = exporter.from_notebook_node(notebook)
    return NEIGHBOUR.sub(r'href="\1.html', SCRIPT.sub("", page))


def title(notebook: NotebookNode) -> str:
    """The first heading."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("# "):
                    return line[2:].strip()
    return "Untitled"


def index(build: Path, tables: dict[str, list[Table]]) -> None:
    """build/html/index.html: the pages there are, each with its seconds and its tables."""
    parts = []
    for page in sorted((build / "html").glob("[0-9][0-9]_*.html")):
        source, note = NOTEBOOKS / f"{page.stem}.ipynb", build / "done" / f"{page.stem}.json"
        if not (source.is_file() and note.is_file()):
            continue
        name = escape.escape(title(nbformat.read(source, as_version=4)))
        seconds = json.loads(note.read_text(encoding="utf8"))["seconds"]
        parts.append(
            f'<h2><a href="{page.name}">{name}</a></h2><p class="small">ran in {seconds:.0f} s</p>'
        )
        parts += [table._repr_html_() for table in tables.get(page.stem, [])]
    body = "\n".join(parts)
    replace_all(
        build / "html",
        {
            "index.html": (
                '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
                f"<title>Tight Fit</title><style>{STYLE}</style></head>\n"
                f"<body><h1>Tight Fit</h1>\n{body}\n</body></html>\n"
            )
        },
    )

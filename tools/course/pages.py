"""HTML pages of executed notebooks, and an index of them.

A page is one file with its figures, its style and its formulas in it, and needs no network.
"""

from __future__ import annotations

import html as escape
import json
import os
import re
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from nbformat import NotebookNode

from tight_fit.files import replace_all
from tools.course import NOTEBOOKS, badges
from tools.site.formulas import mathml
from tools.site.sources import described

if TYPE_CHECKING:
    from helpers.tables import Table

# A link to a file of the repository: no address, no place in the page itself.
FILE = re.compile(r'href="(?![a-z]+:|#|//)([^"#]+)')
SCRIPT = re.compile(r'<script src="(?:require)?"></script>')
MATHJAX = re.compile(r"<!-- Load mathjax -->.*?<!-- End of mathjax configuration -->", re.DOTALL)
# A figure or a drawing. This template of nbconvert leaves out the words that its output has.
PICTURE = re.compile(
    r'(<div class="jp-Rendered(?:Image|SVG)[^>]*>\s*<img)(?: alt="[^"]*")?'
    r'(?= [^>]*src="data:image/(?:png|svg))'
)
STYLE = """:root { color-scheme: light dark }
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 14px; margin: .5em 0 }
td, th { padding: .2em .8em; text-align: right } th { border-bottom: 1px solid #999 }
td:first-child, th:first-child { text-align: left } .small { opacity: .7 }
.wide { overflow-x: auto }"""  # a table scrolls by itself, and the page stays as wide as a phone


LOOK = "<style>.jp-RenderedSVG img { max-width: 100%; height: auto }</style>\n</head>"


def html(notebook: NotebookNode, path: Path, folder: Path, pages: Container[str] = ()) -> str:
    """One self-contained page.

    path    the notebook's own file, which its links start from
    folder  where the page will lie
    pages   the notebooks, by their names without suffix, whose pages will lie there too; links to
            them lead to these pages, all others to the repository's files
    The notebook's pictures get the words of `described`.
    """
    from nbconvert import HTMLExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Formulas(IPythonRenderer):
        def block_math(self, body: str) -> str:
            return mathml(body, "block")

        def inline_math(self, body: str) -> str:
            return mathml(body, "inline")

    def shown(source: str) -> str:
        return MarkdownWithMath(renderer=Formulas(escape=False)).render(source)

    exporter = HTMLExporter(
        template_name="lab",
        embed_images=True,
        require_js_url="",
        mermaid_js_url="",
        filters={"markdown2html": shown},
    )
    exporter.log.setLevel("ERROR")
    notebook.metadata.title = title(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":  # badges are pictures from the internet
            kept = [line for line in cell.source.split("\n") if badges.MARK not in line]
            cell.source = "\n".join(kept)
    page, _ = exporter.from_notebook_node(notebook)
    page = page.replace("</head>", LOOK, 1)
    words = iter([text for cell in notebook.cells for text in described(cell)])
    page = PICTURE.sub(lambda found: f'{found[1]} alt="{escape.escape(next(words))}"', page)

    def lead(link: re.Match) -> str:
        target = (path.parent / link[1]).resolve()
        if target.suffix == ".ipynb" and target.stem in pages:
            return f'href="{target.stem}.html'
        return f'href="{os.path.relpath(target, folder.resolve())}'

    return FILE.sub(lead, MATHJAX.sub("", SCRIPT.sub("", page)))


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
        shown = [table._repr_html_() for table in tables.get(page.stem, [])]
        parts += [f'<div class="wide" tabindex="0">{table}</div>' for table in shown]
    body = "\n".join(parts)
    replace_all(
        build / "html",
        {
            "index.html": (
                '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
                '<meta name="viewport" content="width=device-width, initial-scale=1">'
                f"<title>Tight Fit</title><style>{STYLE}</style></head>\n"
                f"<body><h1>Tight Fit</h1>\n{body}\n</body></html>\n"
            )
        },
    )

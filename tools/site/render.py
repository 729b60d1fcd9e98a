"""Sphinx extension: formulas as MathML, and the texts that are searched, made with the site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from tools.site.formulas import mathml

SEARCHED = 30_000  # characters of a page


def inline(self: Any, node: nodes.math) -> None:
    """Write a formula in a line."""
    self.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(self: Any, node: nodes.math_block) -> None:
    """Write a formula of its own."""
    formula = mathml(node.astext(), "block")
    self.body.append(f'<div class="math-block" tabindex="0" role="math">{formula}</div>')
    raise nodes.SkipNode


def search(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Let the page of the search, and no other, load the texts of all pages."""
    if page == "search":
        app.add_js_file("texts.js")
        app.add_js_file("search.js")


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write {page: its text} as a script, for excerpts and for the order of what was found."""
    if error is not None or app.builder.name != "html":
        return
    texts = {}
    for page in app.env.found_docs:
        parts = app.env.get_doctree(page).findall(nodes.Text)
        said = " ".join(part.astext() for part in parts if not isinstance(part.parent, nodes.raw))
        texts[page] = " ".join(said.split())[:SEARCHED]
    script = f"const TEXTS = {json.dumps(texts, ensure_ascii=False)};"
    Path(app.outdir, "_static", "texts.js").write_text(script, encoding="utf8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the formulas' renderer and the texts of the search."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    app.connect("html-page-context", search)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

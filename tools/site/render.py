"""Sphinx extension: formulas as MathML, made when the site is built."""

from __future__ import annotations

import html
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def inline(self: Any, node: nodes.math) -> None:
    """Write a formula in a line."""
    self.body.append(_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(self: Any, node: nodes.math_block) -> None:
    """Write a formula of its own."""
    formula = _mathml(node.astext(), "block")
    self.body.append(f'<div class="math-block" tabindex="0" role="math">{formula}</div>')
    raise nodes.SkipNode


def _mathml(latex: str, display: str) -> str:
    """MathML; the LaTeX itself, as text, where it cannot be converted."""
    try:
        return convert(latex.strip(), display=display)
    except Exception:  # latex2mathml raises its own and others for what it does not know
        return f"<code>{html.escape(latex)}</code>"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the formulas' renderer."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Sphinx extension: formulas as MathML."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from tools.site.formulas import mathml


def inline(self: Any, node: nodes.math) -> None:
    """Write a formula in a line."""
    self.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(self: Any, node: nodes.math_block) -> None:
    """Write a formula of its own."""
    formula = mathml(node.astext(), "block")
    self.body.append(f'<div class="math-block" tabindex="0" role="math">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the formulas' renderer."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

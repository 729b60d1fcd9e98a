"""Formulas as MathML, which a browser shows without a script and without a network."""

from __future__ import annotations

import html

from latex2mathml.converter import convert


def mathml(latex: str, display: str) -> str:
    """MathML; the LaTeX itself, as text, where it cannot be converted.

    display  "inline" in a line, "block" for a formula of its own
    """
    try:
        return convert(latex.strip(), display=display)
    except Exception:  # latex2mathml raises its own and others for what it does not know
        return f"<code>{html.escape(latex)}</code>"

"""Generated parts of pages, each between two marks."""

from __future__ import annotations

import re


def with_block(text: str, name: str, content: str) -> str:
    """The text with `content` between `<!-- name -->` and `<!-- /name -->`, if it has these."""
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = rf"<!-- {name} -->\n.*?<!-- /{name} -->"
    return re.sub(pattern, lambda _: block, text, flags=re.DOTALL)

"""Tables of the course as Markdown, for pages that GitHub shows."""

from __future__ import annotations

import re

from helpers.tables import Table


def of(table: Table) -> str:
    """The lines of a table, without its caption."""
    rows = [table.frame.columns, ["---"] * len(table.frame.columns)]
    rows += table.frame.itertuples(index=False)
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in rows)


def cell(value: object) -> str:
    """A value as the text of a cell: no tag, no end of the cell or of the line."""
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", " ".join(str(value).split()))
    return re.sub(r"(?<!\\)\|", r"\|", text)

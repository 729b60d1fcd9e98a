"""Published figures as they are kept, and generated parts of pages, each between two marks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

DATA = Path(__file__).parent / "data"


def records(name: str, **options: Any) -> pd.DataFrame:
    """The rows of a file of benchmarks/data; lines that begin with # name its source and
    licence. The options are those of pandas.read_csv."""
    return pd.read_csv(DATA / name, comment="#", **options)


def with_block(text: str, name: str, content: str) -> str:
    """The text with `content` between `<!-- name -->` and `<!-- /name -->`, if it has these."""
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = rf"<!-- {name} -->\n.*?<!-- /{name} -->"
    return re.sub(pattern, lambda _: block, text, flags=re.DOTALL)

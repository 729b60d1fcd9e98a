"""Published figures as they are kept, and generated parts of pages, each between two marks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

DATA = Path(__file__).parent / "data"


def records(name: str, **options: Any) -> pd.DataFrame:
    """The rows of a file of benchmarks/data; lines that begin with # name its source and
    licence. The options are those of pandas.read_csv."""
    return pd.read_csv(DATA / name, comment="#", **options)


def config_of(model: str) -> Any:
    """The configuration of transformers of a model of data/models.json."""
    from transformers import AutoConfig  # takes seconds, which most callers need not wait

    fields = json.loads((DATA / "models.json").read_text(encoding="utf8"))[model]
    return AutoConfig.for_model(**fields)


def with_block(text: str, name: str, content: str) -> str:
    """The text with `content` between `<!-- name -->` and `<!-- /name -->`, if it has these."""
    block = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
    pattern = rf"<!-- {name} -->\n.*?<!-- /{name} -->"
    return re.sub(pattern, lambda _: block, text, flags=re.DOTALL)

"""The calculator's page: its files, and the kept plans as a script that they load."""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

from tight_fit import gpus
from tight_fit.models import names as model_names
from tight_fit.optimizer_kinds import KINDS
from tools.calculator.families import OPTIMIZERS
from tools.calculator.make import read_file, times

PAGE = Path(__file__).with_name("page")


def data() -> dict[str, Any]:
    """What the page reads: kept plans, GPUs, and what a GPU needs beside tensors (bytes).

    Seconds are those of the command's kept answers.
    """
    kept = read_file()
    models = {
        name: facts | {"seconds": times(name), "grouped": _grouped(name)}
        for name, facts in kept["models"].items()
    }
    return {
        **kept,
        "models": models,
        "optimizers": {name: KINDS[name].label for name in OPTIMIZERS},
        "gpus": [gpu._asdict() for gpu in gpus.KNOWN.values()],
        "constants": {
            "context": gpus.CONTEXT,
            "workspace": gpus.WORKSPACE,
            "hopper_workspace": gpus.HOPPER_WORKSPACE,
            "margin": gpus.MARGIN,
            "seen": gpus.SEEN,
            "any": gpus.ANY,
        },
    }


def _grouped(name: str) -> bool:
    """Whether several heads of queries share one of keys, which older GPUs have no kernel for."""
    values = model_names.known()[name]
    return values.get("num_key_value_heads") not in (None, values.get("num_attention_heads"))


def write(folder: Path) -> None:
    """Write the page to a folder, where it works without a server.

    A page that is opened as a file may load scripts but fetch nothing, so the plans are a script.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in PAGE.iterdir():
        shutil.copy(file, folder / file.name)
    text = json.dumps(data(), separators=(",", ":"), ensure_ascii=False)
    text = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    (folder / "plans.js").write_text(f'window.TIGHT_FIT_PLANS = "{text}";\n', encoding="utf8")

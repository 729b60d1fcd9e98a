"""Store a mini model with its model card: `card.json` for programs, `README.md` for people.

The weights are fp16 safetensors, because those of microsoft/deberta-v3-base on the hub are fp16 as
well. Who loads either must ask for float32 (`from_pretrained(..., dtype=torch.float32)`), and
otherwise fine-tunes half-precision weights without meaning to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from tight_fit.command.arguments import new_folder, whole_number

# Files that say something about the model and are no part of it.
WRITTEN = ("card.json", "README.md")
LICENCE = (
    "The weights were made from scratch by this script; they are ours, under the project's licence."
)


def parser(description: str, folder: Path, steps: int) -> argparse.ArgumentParser:
    """The arguments that every pretraining takes; `folder` and `steps` are their defaults."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--out", type=new_folder, default=folder, help="folder to write (default: %(default)s)"
    )
    made.add_argument(
        "--steps",
        type=whole_number(1, 10**7),
        default=steps,
        help="how many (default: %(default)s)",
    )
    return made


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def facts(model: torch.nn.Module, folder: Path) -> dict[str, object]:
    """What the model card says of files and machine: parameters, bytes, digests, versions."""
    files = sorted(path for path in folder.iterdir() if path.name not in WRITTEN)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": {path.name: path.stat().st_size for path in files},
        "sha256": {path.name: sha256(path) for path in files},
        "device": f"CPU, one thread, {platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "licence": LICENCE,
    }


def write(folder: Path, title: str, content: Mapping[str, object], prose: str) -> None:
    """folder/card.json and folder/README.md."""
    (folder / "card.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")
    (folder / "README.md").write_text(f"# {title}\n\n{prose.strip()}\n", encoding="utf8")


def percent(entry: dict[str, float]) -> str:
    """`91.6 ± 0.3 %` from {"mean", "std"}."""
    return f"{100 * entry['mean']:.1f} ± {100 * entry['std']:.1f} %"


def score_table(scores: dict[str, dict[str, dict]]) -> str:
    """{"60 steps": {"shipped": spread, "random": spread}} as a table, accuracy in per cent."""
    rows = ["| fine-tune | from these weights | from random weights |", "| --- | --- | --- |"]
    for name, entry in scores.items():
        rows.append(f"| {name} | {percent(entry['shipped'])} | {percent(entry['random'])} |")
    return "\n".join(rows)

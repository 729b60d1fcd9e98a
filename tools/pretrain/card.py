"""Storing a mini model and its card: fp16 safetensors, `card.json` for programs, `README.md` for people.

fp16 on disk because the hub's microsoft/deberta-v3-base is fp16 on disk: a reader who loads either must ask
for float32 (`from_pretrained(..., dtype=torch.float32)`), or fine-tune half-precision weights without having
meant to.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import torch
import transformers

WRITTEN = (
    "card.json",
    "comparison.json",
    "README.md",
)  # by the script about the model, not the model itself
LICENCE = (
    "The weights were made from scratch by this script; they are ours, under the project's licence."
)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def facts(model: torch.nn.Module, folder: Path) -> dict[str, object]:
    """What the card says of files and machine: parameters, bytes, digests, device, versions."""
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


def write_json(path: Path, content: dict[str, object]) -> None:
    """`content` as JSON, indented, with a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")


def write_text(folder: Path, title: str, prose: str) -> None:
    """folder/README.md."""
    (folder / "README.md").write_text(f"# {title}\n\n{prose.strip()}\n", encoding="utf8")


def percent(entry: dict[str, object]) -> str:
    """`91.6 ± 0.3 %` from {"mean", "std"}."""
    return f"{100 * entry['mean']:.1f} ± {100 * entry['std']:.1f} %"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def score_table(scores: dict[str, dict[str, dict]]) -> str:
    """{"60 steps": {"shipped": spread, "random": spread}} as a table, accuracy in per cent."""
    rows = [
        (name, percent(entry["shipped"]), percent(entry["random"]))
        for name, entry in scores.items()
    ]
    return table(("fine-tune", "from these weights", "from random weights"), rows)

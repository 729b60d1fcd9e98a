"""Store a mini model with its model card: `card.json` for programs, `README.md` for people.

The weights are fp16 safetensors, because those of microsoft/deberta-v3-base on the hub are fp16 as
well. Who loads either must ask for float32 (`from_pretrained(..., dtype=torch.float32)`), and
otherwise fine-tunes half-precision weights without meaning to. The words of README.md are in
cards/, with the names of card.json's fields in braces.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from tight_fit.command.arguments import new_folder, whole_number
from tools.pretrain.loop import Pretraining

Plan = TypeVar("Plan", bound=Pretraining)
CARDS = Path(__file__).with_name("cards")
# Files that say something about the model and are no part of it.
WRITTEN = ("card.json", "README.md")
LICENCE = (
    "The weights were made from scratch by this script; they are ours, under the project's licence."
)


def asked(description: str, folder: Path, plan: Plan) -> tuple[Plan, Path]:
    """(the plan with the steps that are asked for, the folder to write, which is made).

    folder, plan  what is taken where the command line names no other
    PyTorch computes with one thread from here on, so that sums are added in one order.
    """
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--out", type=new_folder, default=folder, help="folder to write (default: %(default)s)")
    steps = whole_number(1, 10**7)
    add("--steps", type=steps, default=plan.steps, help="how many (default: %(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    return replace(plan, steps=given.steps), given.out


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


def write(
    folder: Path, name: str, model: torch.nn.Module, plan: Pretraining, content: dict[str, Any]
) -> None:
    """folder/card.json and folder/README.md of a model whose other files are there.

    name     of the file in cards/ that has the words
    content  what the card says beside the plan and `facts`
    """
    content = {"plan": asdict(plan), **facts(model, folder), **content}
    (folder / "card.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")
    (folder / "README.md").write_text(prose(name, content), encoding="utf8")


def prose(name: str, content: dict[str, Any]) -> str:
    """README.md of a card with this content."""

    def filled(file: str, **more: str) -> str:
        return (CARDS / file).read_text(encoding="utf8").format(**content, **more)

    data = filled("corpus.md").strip() if "corpus" in content else ""
    return filled(f"{name}.md", table=score_table(content["scores"]), data=data)


def percent(entry: dict[str, float]) -> str:
    """`91.6 ± 0.3 %` from {"mean", "std"}."""
    return f"{100 * entry['mean']:.1f} ± {100 * entry['std']:.1f} %"


def score_table(scores: dict[str, dict[str, dict]]) -> str:
    """{"60 steps": {"shipped": spread, "random": spread}} as a table, accuracy in per cent."""
    rows = ["| fine-tune | from these weights | from random weights |", "| --- | --- | --- |"]
    for name, entry in scores.items():
        rows.append(f"| {name} | {percent(entry['shipped'])} | {percent(entry['random'])} |")
    return "\n".join(rows)

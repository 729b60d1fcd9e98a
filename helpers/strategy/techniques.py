"""What each technique takes of a GPU, by plan, for the models at full size: the table of README and notebooks.

Planning it takes some twenty seconds, so `make readme` keeps it in docs/techniques.json; a test plans it anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from helpers import gpus
from helpers.memory.timeline import Plan
from helpers.plan.planner import plan
from helpers.recipe import Recipe, replace
from helpers.tables import Table
from helpers.units import size

FILE = Path(__file__).parents[2] / "docs" / "techniques.json"
MODELS = {
    "DeBERTa-v3-base, 16 × 256 tokens": Recipe(profile="full", batch_size=16, length=256),
    "ViT-B/16, 32 images": Recipe(profile="full", model="vit", batch_size=32),
}
# A row a technique: the one field that changes.
TECHNIQUES = {
    "plain fp32": {},
    "gradient accumulation, 4 micro-batches": {"accumulation": 4},
    "frozen embeddings and half of the layers": {"frozen": 6},
    "mixed precision, fp16": {"precision": "fp16"},
    "mixed precision, bf16": {"precision": "bf16"},
    "8-bit AdamW": {"optimizer": "adamw8bit"},
    "8-bit AdamW, embeddings in 32 bits": {"optimizer": "adamw8bit_embed32"},
    "gradient checkpointing": {"checkpointing": True},
    "LoRA, rank 8": {"lora_rank": 8},
}


def rows() -> list[dict[str, str]]:
    """A row a technique: planned peak on a GPU for both models, and the smallest card that holds it."""
    found = []
    for name, change in TECHNIQUES.items():
        row = {
            "technique": name,
            "recipe": ", ".join(f"{key}={value!r}" for key, value in change.items()) or "Recipe()",
        }
        for model, recipe in MODELS.items():
            planned = plan(replace(recipe, **change))
            row[model] = f"{size(planned.peak)}, {smallest(planned)}"
        found.append(row)
    return found


def smallest(planned: Plan) -> str:
    """The card with the least memory that holds a plan."""
    for gpu in sorted(gpus.GPUS.values(), key=lambda gpu: gpu.memory):
        if planned.fits(gpu) and (planned.recipe.precision != "bf16" or gpu.bf16):
            return gpu.name
    return "no card"


def write() -> None:
    FILE.write_text(json.dumps(rows(), indent=1, ensure_ascii=False) + "\n", encoding="utf8")


def read() -> list[dict[str, str]]:
    return json.loads(FILE.read_text(encoding="utf8"))


def table(*fields: str) -> Table:
    """All techniques of one GPU side by side, by plan at full size; an arrow marks those that change one of `fields`."""
    kept = read()
    rows = [
        {"": "→" if any(row["recipe"].startswith(f"{field}=") for field in fields) else ""} | row
        for row in kept
    ]
    return Table(
        rows,
        "Plan for a GPU: peak of one optimizer step at full size, and the smallest card that holds it",
    )

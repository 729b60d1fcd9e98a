"""The generated parts of README.md: the table of techniques, the planner's table, the picture. `make readme`."""
from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from helpers import cards, plots, record
from helpers.compare import Table
from helpers.course import NOTEBOOKS, ROOT
from helpers.plan import Plan, plan
from helpers.recipe import Recipe, replace
from helpers.units import size

README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "plan.png"
MODELS = {"DeBERTa-v3-base, 16 × 256 tokens": Recipe(profile="full", batch_size=16, length=256),
          "ViT-B/16, 32 images": Recipe(profile="full", model="vit", batch_size=32)}
# What the course can plan today: a row a technique, the one field that changes.
TECHNIQUES = {"plain fp32": {}, "gradient accumulation, 4 micro-batches": {"accumulation": 4},
              "frozen embeddings and half of the layers": {"frozen": 6},
              "mixed precision, fp16": {"precision": "fp16"}, "mixed precision, bf16": {"precision": "bf16"},
              "8-bit AdamW": {"optimizer": "adamw8bit"},
              "8-bit AdamW, embeddings in 32 bits": {"optimizer": "adamw8bit_embed32"},
              "gradient checkpointing": {"checkpointing": True}, "LoRA, rank 8": {"lora_rank": 8}}


def techniques() -> str:
    """A row a technique: planned peak on a GPU for both models, and the smallest card that holds it."""
    rows = []
    for name, change in TECHNIQUES.items():
        row = {"technique": name, "recipe": ", ".join(f"`{key}={value!r}`" for key, value in change.items()) or "`Recipe()`"}
        for model, recipe in MODELS.items():
            planned = plan(replace(recipe, **change))
            row[model] = f"{size(planned.peak)}, {smallest(planned)}"
        rows.append(row)
    return Table(rows).to_markdown()


def smallest(planned: Plan) -> str:
    """The card with the least memory that holds a plan."""
    for card in sorted(cards.CARDS.values(), key=lambda card: card.memory):
        if planned.fits(card) and (planned.recipe.precision != "bf16" or card.bf16):
            return card.name
    return "no card"


def notebooks() -> str:
    """A row a notebook: its title and what was recorded of it on a GPU."""
    rows = []
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        source = "".join(json.loads(path.read_text(encoding="utf8"))["cells"][0]["source"])
        title = re.search(r"^# (?:\d\d\W+)?(.+)$", source, re.MULTILINE)[1].strip()
        rows.append({"notebook": f"[{path.stem[:2]}](notebooks/{path.name})", "title": title, "recorded": recorded(path.stem)})
    return Table(rows).to_markdown()


def recorded(notebook: str) -> str:
    """A notebook's before and after from results/, in one cell of a table."""
    found = record.read(notebook)
    if not found:
        return "none yet"
    where = next(iter(found.values())).environment["name"]
    return f"{where}: " + "; ".join(
        f"{label} {size(run.peak)} (plan {run.miss:+.1%}), {run.rows_per_second:.0f} rows/s, "
        f"{run.accuracy_label} {run.accuracy:.1%}" for label, run in found.items())


def trust() -> str:
    """How far the plan and the recorded runs on GPUs agree: mean and worst error, or that there is none to compare."""
    runs = [run for path in sorted(record.RESULTS.glob("*.json"))
            if (run := record.Run.from_json(path.read_text(encoding="utf8"))).environment["device"] == "cuda"]
    if not runs:
        return "`results/` holds no run from a GPU yet, so how well a plan agrees with one is not shown."
    worst = max(runs, key=lambda run: abs(run.miss))
    mean = sum(abs(run.miss) for run in runs) / len(runs)
    return (f"Over the {len(runs)} runs from GPUs in `results/`, the planned peak misses CUDA's allocated peak by {mean:.1%} in "
            f"the mean and by {worst.miss:+.1%} at worst ({worst.name}, {worst.environment['name']}).")


def digest() -> str:
    """What the picture shows, in twelve characters."""
    whole = b"".join(planned.timeline.tobytes() for planned in _drawn().values())
    return hashlib.sha256(whole).hexdigest()[:12]


def _drawn() -> dict[str, Plan]:
    before = next(iter(MODELS.values()))
    return {"accumulation=1: one batch of 16": plan(before),
            "accumulation=4: micro-batches of 4, two of four drawn": plan(replace(before, accumulation=4))}


def draw() -> None:
    """Write the picture, with the digest of what it shows in its metadata."""
    figure = plots.timeline(_drawn(), capacity=cards.CARDS["RTX 4060 Laptop"].memory)
    figure.suptitle("DeBERTa-v3-base, 16 × 256 tokens, fp32, AdamW: one optimizer step by plan. Dashed: an 8 GB laptop card")
    figure.set_size_inches(11, 4)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Description": digest(), "Software": None})


def fill(text: str) -> str:
    """README's text with its generated blocks written anew."""
    for name, make in (("techniques", techniques), ("notebooks", notebooks), ("trust", trust)):
        block = f"<!-- {name} -->\n{make()}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- /{name} -->", lambda _: block, text, flags=re.DOTALL)
    return text


def write(path: Path = README) -> None:
    from helpers import plots
    plots.style()
    path.write_text(fill(path.read_text(encoding="utf8")), encoding="utf8")
    draw()
    print(f"Written: {path.name} and {PICTURE.relative_to(ROOT)}")

"""The generated parts of README.md, written by `make readme`: its tables and its picture.

Each block stands between `<!-- name -->` and `<!-- /name -->` and is made by a function of the same
name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from helpers import gpus, plots, record
from helpers.memory.timeline import Plan
from helpers.parallel import Parallel
from helpers.plan.planner import plan
from helpers.recipe import Recipe, replace
from helpers.strategy import techniques as planned
from helpers.strategy.plan_ranks import plan_parallel
from helpers.tables import Table
from helpers.units import size
from tools.course import NOTEBOOKS, ROOT, trust
from tools.course.badges import with_block

README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "plan.png"

RECORDED = (
    "{label} {peak} (plan {miss:+.1%}), {speed:.0f} {examples}/s, {accuracy_label} {accuracy:.1%}"
)
PICTURE_TITLE = (
    "DeBERTa-v3-base, 16 × 256 tokens, fp32, AdamW: one optimizer step by plan. "
    "Dashed: a laptop GPU with 8 GB"
)
LAYOUTS = (
    Parallel(),
    Parallel(data=4),
    Parallel(data=4, zero_stage=1),
    Parallel(data=4, zero_stage=2),
    Parallel(data=4, zero_stage=3),
    Parallel(tensor=4),
    Parallel(pipeline=4),
)
LINKS = ("NVLink 3", "PCIe 4 x16")  # between the A100s of the table of ranks


def techniques() -> str:
    """The table of techniques, planned anew, not read from the kept plans."""
    rows = planned.rows(plan)
    return Table([row | {"recipe": f"`{row['recipe']}`"} for row in rows]).to_markdown()


def notebooks() -> str:
    """The table of notebooks: the title of each, and what was recorded of it on a GPU."""
    rows = []
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        rows.append(
            {
                "notebook": f"[{path.stem[:2]}](notebooks/{path.name})",
                "title": title(path),
                "recorded": recorded(path.stem),
            }
        )
    return Table(rows).to_markdown()


def title(path: Path) -> str:
    """A notebook's title, without its number. Raises ValueError where its first cell has none."""
    source = "".join(json.loads(path.read_text(encoding="utf8"))["cells"][0]["source"])
    match = re.search(r"^# (?:\d\d\W+)?(.+)$", source, re.MULTILINE)
    if match is None:
        raise ValueError(f"{path.name} has no title: begin its first cell with `# `.")
    return match[1].strip()


def recorded(notebook: str) -> str:
    """A notebook's before and after from results/, in one cell of a table."""
    runs = record.read(notebook)
    if not runs:
        return "none yet"
    device = next(iter(runs.values())).environment["name"]
    parts = [
        RECORDED.format(
            label=label,
            peak=size(run.peak),
            miss=run.miss,
            speed=run.rows_per_second,
            examples="images" if run.recipe.task == "image" else "examples",
            accuracy_label=run.accuracy_label,
            accuracy=run.accuracy,
        )
        for label, run in runs.items()
    ]
    return f"{device}: {'; '.join(parts)}"


def ranks() -> str:
    """The table of layouts: what each of four GPUs holds and sends, planned anew for one step."""
    recipe = Recipe(profile="full", batch_size=16, length=256, accumulation=4)
    return Table([_of_layout(recipe, layout) for layout in LAYOUTS]).to_markdown()


def _of_layout(recipe: Recipe, layout: Parallel) -> dict[str, str]:
    planned_ranks = plan_parallel(recipe, layout)
    changed = {
        name: value for name, value in vars(layout).items() if value != getattr(Parallel, name)
    }
    fields = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    sent = sum(planned_ranks.bytes_by_collective.values())
    seconds = {link: planned_ranks.seconds("A100-40GB", link).total for link in LINKS}
    return {
        "layout": f"`Parallel({fields})`",
        "peak per rank": size(planned_ranks.peak),
        "sent per rank": size(sent) if sent else "nothing",
        **{f"A100s, {link}": f"{total * 1e3:.0f} ms" for link, total in seconds.items()},
    }


def digest() -> str:
    """What the picture shows, as the first twelve hexadecimal digits of a SHA-256."""
    timelines = b"".join(step.timeline.tobytes() for step in _drawn().values())
    return hashlib.sha256(timelines).hexdigest()[:12]


def _drawn() -> dict[str, Plan]:
    before = next(iter(planned.MODELS.values()))
    after = replace(before, accumulation=4)
    return {
        "accumulation=1: one batch of 16": plan(before),
        "accumulation=4: micro-batches of 4, two of four drawn": plan(after),
    }


def draw() -> None:
    """Write the picture, with the digest of what it shows in its metadata."""
    figure = plots.timeline(_drawn(), capacity=gpus.GPUS["RTX 4060 Laptop"].memory)
    figure.suptitle(PICTURE_TITLE)
    figure.set_size_inches(11, 4)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110, metadata={"Description": digest(), "Software": None})


BLOCKS: dict[str, Callable[[], str]] = {
    "techniques": techniques,
    "notebooks": notebooks,
    "trust": trust.text,
    "ranks": ranks,
}


def fill(text: str, but: str = "") -> str:
    """README's text with its generated blocks written anew, except the one named `but`."""
    for name, make in BLOCKS.items():
        if name != but:
            text = with_block(text, name, make())
    return text


def write(path: Path = README) -> None:
    """Write README's blocks and the picture."""
    plots.style()
    path.write_text(fill(path.read_text(encoding="utf8")), encoding="utf8")
    draw()
    print(f"Written: {path.name} and {PICTURE.relative_to(ROOT)}")

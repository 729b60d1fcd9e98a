"""The generated parts of README.md and docs/, written by `make readme`: tables and a picture.

Each block stands between `<!-- name -->` and `<!-- /name -->` of its page and is made by a
function of `blocks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from benchmarks import techniques as planned
from benchmarks.pages import with_block
from benchmarks.programs import table
from helpers import plots
from helpers.plan import plan
from helpers.recipe import replace
from tight_fit import gpus
from tight_fit.memory.plan import Plan
from tools.course import ROOT, blocks, trust

README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "plan.png"

PICTURE_TITLE = (
    "DeBERTa-v3-base, 16 × 256 tokens, fp32, AdamW: one optimizer step by plan. "
    "Dashed: a laptop GPU with 8 GB"
)
# {page: {block: what makes it}}
PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {
        "techniques": blocks.techniques,
        "answer": blocks.answer,
        "trust": blocks.trust,
    },
    ROOT / "docs" / "lessons.md": {"notebooks": blocks.notebooks},
    ROOT / "docs" / "techniques.md": {
        "planned": blocks.planned_techniques,
        "epochs": blocks.epochs,
    },
    ROOT / "docs" / "layouts.md": {
        "ranks": blocks.ranks,
        "large": blocks.large,
    },
    ROOT / "docs" / "accuracy.md": {"steps": trust.text},
    ROOT / "docs" / "checked-programs.md": {"programs": table.markdown},
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


def filled(page: Path) -> str:
    """A page's text with its generated blocks written anew."""
    text = page.read_text(encoding="utf8")
    for name, make in PAGES[page].items():
        text = with_block(text, name, make())
    return text


def write() -> None:
    """Write the blocks of all pages, and the picture."""
    plots.style()
    for page in PAGES:
        page.write_text(filled(page), encoding="utf8")
        print(f"Written: {page.relative_to(ROOT)}")
    draw()
    print(f"Written: {PICTURE.relative_to(ROOT)}")

"""What `make readme` writes into pages: tables, the command's answer, and a line on accuracy."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace as with_
from pathlib import Path

from benchmarks import gpu_models_table, layout_searches, markdown, published_times
from benchmarks import techniques as planned
from benchmarks.peaks import page
from benchmarks.sweeps import results
from helpers import kept_layouts, record, show
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from helpers.tables import Table
from tight_fit.command import kept, report
from tight_fit.command.ship import asked_of
from tight_fit.gpus import find
from tight_fit.kernels.step_seconds import lacks
from tight_fit.models import names as model_names
from tight_fit.units import duration, size, span
from tools.course import NOTEBOOKS, kept_plans

RECORDED = (
    "{label} {peak} (plan {miss:+.1%}), {speed:.0f} {examples}/s, {accuracy_label} {accuracy:.1%}"
)
ASKED = ("roberta-large", "T4")  # what README asks the command
EPOCH = 10_000  # examples
PRICES = {"T4": 0.35, "A100-40GB": 1.50}  # per GPU hour, stated for the table; --price takes others
SAME = "the same gradients"
NOT_COMPARED = "not compared"
# {technique: (its lesson, the sweep and arm that show its accuracy, or words, and when to use it)}
SHORT: dict[str, tuple[str, tuple[str, str] | str, str]] = {
    "plain fp32": ("00_start_here", "the reference", "it fits"),
    "gradient accumulation, 4 micro-batches": (
        "02_gradient_accumulation",
        SAME,
        "first, when the batch does not fit",
    ),
    "mixed precision, fp16": ("04_mixed_precision", NOT_COMPARED, "nearly always: it is faster"),
    "gradient checkpointing": ("06_gradient_checkpointing", SAME, "activations take the memory"),
    "8-bit AdamW": (
        "05_eight_bit_optimizers",
        ("05_eight_bit", "AdamW, 8-bit states"),
        "optimizer states take the memory",
    ),
    "frozen embeddings and half of the layers": (
        "03_freezing",
        ("03_freezing", "lower half frozen"),
        "little data, or a task near the pretraining",
    ),
    "LoRA, rank 8": (
        "07_lora",
        ("07_lora", "LoRA: query and value, rank 8"),
        "a large model, or many tasks",
    ),
}


def techniques() -> str:
    """README's table: what each technique saves of DeBERTa-v3-base, costs, keeps, and when."""
    base = planned.MODELS["DeBERTa-v3-base, 16 × 256 tokens"]
    rows = []
    plain = plan(base)
    for name, (lesson, accuracy, when) in SHORT.items():
        changed = plan(replace(base, **planned.TECHNIQUES[name]))
        first = name == next(iter(SHORT))
        times = [
            span(plain.seconds(gpu).total)
            if first
            else f"× {changed.seconds(gpu).total / plain.seconds(gpu).total:.2f}"
            for gpu in planned.TIMED
        ]
        rows.append(
            {
                "technique": f"[{name}](notebooks/{lesson}.ipynb)",
                "memory": size(changed.peak)
                + ("" if first else f" ({changed.peak / plain.peak:.0%})"),
                "time": " / ".join(times),
                "accuracy kept": _accuracy(accuracy),
                "when": when,
            }
        )
    return markdown.of(Table(rows))


def _accuracy(source: tuple[str, str] | str) -> str:
    if isinstance(source, str):
        return source
    difference = results.read(source[0]).difference(source[1])
    low, high = difference.low * 100, difference.high * 100
    if low == high == 0:
        return "the same in each seed"
    return f"{difference.mean * 100:+.1f} points [{low:+.1f}, {high:+.1f}]"


def planned_techniques() -> str:
    """The table of techniques, planned anew, not read from the kept plans."""
    rows = planned.rows()
    return markdown.of(Table([row | {"recipe": f"`{row['recipe']}`"} for row in rows]))


def epochs() -> str:
    """Hours and price of an epoch of `EPOCH` examples by technique, model and GPU."""
    rows = []
    for name, change in planned.TECHNIQUES.items():
        row = {"technique": name}
        for model, base in planned.MODELS.items():
            recipe = replace(base, **change)
            operations = plan(recipe).operations
            for gpu, price in PRICES.items():
                column = f"{model.split(',')[0]}, {gpu} at {price:.2f} an hour"
                lacking = lacks(operations, gpu)
                row[column] = f"no {lacking}" if lacking else _epoch(recipe, gpu, price)
        rows.append(row)
    return markdown.of(Table(rows))


def _epoch(recipe: Recipe, gpu: str, price: float) -> str:
    facts = {"batch_size": recipe.batch_size, "seconds": plan(recipe).seconds(gpu).total}
    known = report.with_epoch(facts, EPOCH, price)
    return f"{duration(known['epoch_hours'] * 3600)}, {known['epoch_cost']:.3f}"


def answer() -> str:
    """What the command prints to README's question, up to the bytes, from the shipped answers."""
    name, gpu = ASKED
    asked = with_(asked_of(model_names.full_name(name)), model=name, gpu=find(gpu))
    facts = kept.shipped(asked)
    if facts is None:
        raise ValueError(f"No answer about {name} comes with the package: run `make plans`.")
    facts["assumed"] = asked.assumed(facts)
    lines = [*report.verdict(facts), *report.advice(facts)]
    typed = shlex.join(["tight-fit", name, "--gpu", gpu])
    took = next(line for line in report.details(facts) if line.startswith("A step takes"))
    return "\n".join(["```text", f"$ {typed}", *lines, "...", took, "```"])


def trust() -> str:
    """One line on how far plans of memory and of time are off."""
    allocated, reserved = (
        page.Errors.of(page.counted(kind)) for kind in (page.ALLOCATED, page.RESERVED)
    )
    times, mean, median, worst = published_times.missed()
    return (
        "Plans miss the allocated memory of steps that others measured on GPUs by "
        f"{allocated.mean:.1%} in the mean ({allocated.count} steps, {allocated.worst:+.1%} at "
        f"worst), the reserved by {reserved.mean:.1%} ({reserved.count}, {reserved.worst:+.1%}); "
        f"{gpu_models_table.short()}: [every comparison](docs/accuracy.md). They miss seconds by "
        f"{mean:.0%} ({times} vision models, {worst:+.0%} at worst): "
        f"[by kind](docs/gpu-time.md)."
    )


def notebooks() -> str:
    """The table of lessons: the title of each, its lab, and what was recorded on a GPU, if any."""
    lessons = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    records = {path: recorded(path.stem) for path in lessons}
    rows = []
    for path in lessons:
        row = {
            "lesson": f"[{path.stem[:2]}](../notebooks/{path.name})",
            "title": title(path),
            "lab": f"[lab](../notebooks/labs/{path.stem}_lab.ipynb)",
        }
        if any(records.values()):
            row["recorded"] = records[path]
        rows.append(row)
    return markdown.of(Table(rows))


def title(path: Path) -> str:
    """A notebook's title, without its number. Raises ValueError where its first cell has none."""
    source = "".join(json.loads(path.read_text(encoding="utf8"))["cells"][0]["source"])
    match = re.search(r"^# (?:\d\d\W+)?(.+)$", source, re.MULTILINE)
    if match is None:
        raise ValueError(f"{path.name} has no title: begin its first cell with `# `.")
    return match[1].strip()


def recorded(notebook: str) -> str:
    """A notebook's before and after from results/, in one cell of a table; "" without a record."""
    runs = record.read(notebook)
    if not runs:
        return ""
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
    """The table of layouts: what each of two GPUs holds and sends, by kept plans of one step."""
    rows: dict[str, dict[str, str]] = {}
    for step, layout, cluster in kept_plans.page():
        facts = kept_layouts.facts(step, layout, cluster)
        sent = sum(sum(kinds.values()) for kinds in facts["sent"].values())
        row = {
            "layout": f"`{layout}`",
            "need per GPU": size(facts["need"]),
            "sent per GPU": size(sent) if sent else "nothing",
        }
        rows.setdefault(str(layout), row)[f"A100s, {cluster.inside.name}"] = span(facts["seconds"])
    return markdown.of(Table(list(rows.values())))


def large() -> str:
    """The kept searches of layouts for 8 and 70 billion parameters, a table each."""
    tables = [show.large(name) for name in layout_searches.JOBS]
    return "\n\n".join(f"{table.caption}\n\n{markdown.of(table)}" for table in tables)

"""Plans of Qwen-7B's published steps, kept in qwen.json, and their part of docs/accuracy.md.

`python -m benchmarks.peaks Qwen` makes them anew (some minutes) and writes the page.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.peaks.point import A100
from benchmarks.peaks.qwen import (
    MICRO_BATCHES,
    PUBLISHED,
    QLORA,
    SOURCE,
    TRACED,
    QwenRow,
    qwen_setup,
)
from helpers.tables import Table
from tight_fit.gpus import CONTEXT
from tight_fit.kernels.op import OPTIMIZER
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.units import duration, size

GB = 10**9  # bytes: the page's unit
KEPT = Path(__file__).with_name("qwen.json")
TEXT = """## Language models, as nvidia-smi shows them

Qwen-7B was fine-tuned on an A100 with 80 GB by three ways, and memory and seconds per step were
[published]({source}). [benchmarks/peaks/qwen.py](../benchmarks/peaks/qwen.py) says how the steps
were set up, before their plans were seen, and what is not known of them. The planned memory is what
PyTorch reserves and {context} for the CUDA context, which nvidia-smi shows as well.

{sentence}

[data/qwen.csv](data/qwen.csv) has every step.
"""


def plan(row: QwenRow) -> dict[str, float]:
    """{"reserved": bytes, "allocated": bytes, "seconds": of a step} of a published row."""
    steps = 1 if row.way == QLORA else 2  # its states are there before the first step
    planned = plan_custom_step(qwen_setup(row.way, row.length), torch_version="2.0", steps=steps)
    peaks, operations = planned.allocator_peaks(A100), planned.operations
    end = next(place for place, (_, phase) in enumerate(operations.order) if phase == OPTIMIZER)
    operations.repeat(end // TRACED, end, MICRO_BATCHES - TRACED)
    took = planned.seconds(A100)
    return {
        "reserved": peaks.reserved,
        "allocated": peaks.allocated,
        "seconds": float(f"{took.total:.4g}"),
    }


def read() -> dict[str, dict[str, float]]:
    """{name of a row: what `plan` gave}"""
    return json.loads(KEPT.read_text(encoding="utf8")) if KEPT.is_file() else {}


def errors() -> list[tuple[QwenRow, float, float]]:
    """(row, error of its memory, error of its seconds), as planned / measured - 1, of all rows
    that have a kept plan."""
    kept = read()
    return [
        (
            row,
            (kept[row.name]["reserved"] + CONTEXT) / (row.memory * GB) - 1,
            kept[row.name]["seconds"] / row.seconds - 1,
        )
        for row in PUBLISHED
        if row.name in kept
    ]


def sentence() -> str:
    """How far the plans miss, in words."""
    found = errors()
    words = []
    for what, place in (("memory", 1), ("seconds", 2)):
        misses = [row[place] for row in found]
        worst = max(found, key=lambda row: abs(row[place]))
        words.append(
            f"{what} by {statistics.mean(map(abs, misses)):.1%} in the mean "
            f"({worst[place]:+.1%} at worst: {worst[0].name})"
        )
    said = f"The plan misses the {len(found)} steps' {words[0]}, and their {words[1]}."
    missing = [row.name for row in PUBLISHED if row.name not in read()]
    return f"{said} Set up and not planned yet: {'; '.join(missing)}." if missing else said


def table() -> Table:
    """A row per published step."""
    kept = read()
    return Table(
        [
            {
                "Qwen-7B": row.name,
                "nvidia-smi": f"{row.memory} GB",
                "planned": f"{(kept[row.name]['reserved'] + CONTEXT) / GB:.2f} GB",
                "error": f"{memory:+.1%}",
                "step": f"{row.seconds} s",
                "planned step": duration(kept[row.name]["seconds"]),
                "error of the time": f"{seconds:+.1%}",
            }
            for row, memory, seconds in errors()
        ]
    )


def section() -> str:
    """The part of the page."""
    return TEXT.format(source=SOURCE, context=size(CONTEXT), sentence=sentence())


def make(report: Callable[[str], None] = lambda line: None) -> None:
    """Plan every row and keep the results."""
    kept = read()
    for row in PUBLISHED:
        kept[row.name] = plan(row)
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf8")
        report(f"Qwen-7B, {row.name}: {kept[row.name]}")

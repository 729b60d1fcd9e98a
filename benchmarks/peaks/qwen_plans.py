"""Plans of Qwen-7B's published steps, kept in data/qwen.json, and their part of docs/accuracy.md.

`python -m benchmarks.peaks Qwen` makes them anew (some minutes) and writes the page.
"""

from __future__ import annotations

from functools import partial

import pandas as pd

from benchmarks import comparison
from benchmarks.comparison import Errors
from benchmarks.peaks.qwen import (
    MICRO_BATCHES,
    PUBLISHED,
    QLORA,
    TRACED,
    QwenRow,
    qwen_setup,
)
from tight_fit.gpus import CONTEXT
from tight_fit.kernels.op import OPTIMIZER
from tight_fit.memory.plan import Plan
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.units import duration

GPU = "A100-80GB"
GB = 10**9  # bytes: the page's unit


def planned(row: QwenRow) -> Plan:
    """The plan of a published row, with the operations of all its micro-batches."""
    steps = 1 if row.way == QLORA else 2  # its states are there before the first step
    found = plan_custom_step(qwen_setup(row.way, row.length), torch_version="2.0", steps=steps)
    operations = found.operations
    end = next(place for place, (_, phase) in enumerate(operations.order) if phase == OPTIMIZER)
    operations.repeat(end // TRACED, end, MICRO_BATCHES - TRACED)
    return found


def plan(row: QwenRow) -> dict[str, float]:
    """{"reserved": bytes, "allocated": bytes, "seconds": of a step} of a published row."""
    found = planned(row)
    peaks, took = found.allocator_peaks(GPU), found.seconds(GPU)
    return {
        "reserved": peaks.reserved,
        "allocated": peaks.allocated,
        "seconds": float(f"{took.total:.4g}"),
    }


def read() -> dict[str, dict[str, float]]:
    """{name of a row: what `plan` gave}"""
    return comparison.read("qwen")


def errors() -> pd.DataFrame:
    """planned / measured - 1 of the "memory" and the "seconds" of every row, by its name."""
    kept = pd.DataFrame(read()).T
    published = pd.DataFrame({row.name: (row.memory, row.seconds) for row in PUBLISHED}).T
    return pd.DataFrame(
        {
            "memory": (kept["reserved"] + CONTEXT) / (published[0] * GB) - 1,
            "seconds": kept["seconds"] / published[1] - 1,
        }
    ).loc[published.index]


def sentence() -> str:
    """How far the plans miss, in words."""
    words = []
    for what, found in errors().items():
        of = Errors.of(found)
        words.append(f"{what} by {of.mean:.1%} in the mean ({of.worst:+.1%} at worst: {of.name})")
    return f"The plan misses the {len(PUBLISHED)} steps' {words[0]}, and their {words[1]}."


def table() -> pd.DataFrame:
    """A row per published step."""
    kept, missed = read(), errors()
    return pd.DataFrame(
        [
            {
                "Qwen-7B": row.name,
                "nvidia-smi": f"{row.memory} GB",
                "planned": f"{(kept[row.name]['reserved'] + CONTEXT) / GB:.2f} GB",
                "error": f"{missed['memory'][row.name]:+.1%}",
                "step": f"{row.seconds} s",
                "planned step": duration(kept[row.name]["seconds"]),
                "error of the time": f"{missed['seconds'][row.name]:+.1%}",
            }
            for row in PUBLISHED
        ]
    )


def make() -> None:
    """Plan every row and keep the results."""
    plans = {row.name: partial(plan, row) for row in PUBLISHED}
    comparison.make("qwen", plans, list(plans))

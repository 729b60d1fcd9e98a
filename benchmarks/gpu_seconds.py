"""Seconds of real steps on our own GPUs beside their plans: docs/data/gpu-seconds.csv.

    python -m benchmarks.gpu_seconds [--write]

The steps are those of results/models and results/steps, whose files also hold what the planner of
that day said. Compiled steps are left out, as others were being compiled beside them.
`tight_fit/gpus/rates.py` says to which of them constants were fitted: their groups are named
"fitted" here, and nothing was fitted to the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence

from benchmarks import gpu_models_table
from benchmarks.gpu_model_cases import CASES, step_of
from benchmarks.gpu_models import planned
from benchmarks.gpu_models_table import NO_PLAN, in_percent, off
from benchmarks.pages import with_block
from helpers import record
from helpers.plan import plan
from helpers.recipe import Recipe
from helpers.tables import Table
from tight_fit import gpus
from tight_fit.command.wrapper import run
from tight_fit.gpus import calibration

PAGE = record.RESULTS.parent / "docs" / "data" / "gpu-seconds.csv"
TOLD = PAGE.parents[1] / "gpu-time.md"
QWEN, SINGLE = "Qwen3-0.6B, fitted", "GPT-2, ResNet-50: a constant fitted to each"
OTHERS, RECIPES = "other models, held out", "the course's recipes, held out"
GROUPS = (QWEN, SINGLE, OTHERS, RECIPES)


def group_of(name: str) -> str:
    """The group of a step of results/models."""
    if name.startswith("Qwen3-0.6B"):
        return QWEN
    return SINGLE if name in ("GPT-2 medium", "ResNet-50") else OTHERS


def rows(names: Sequence[str] | None = None) -> list[dict[str, str]]:
    """A row per step: seconds measured, planned before and planned anew.

    names  only these steps of results/models, and no recipe; None takes all
    """
    found = []
    with calibration.chosen(calibration.NONE):
        for kept in gpu_models_table.files():
            gpu = gpus.find(kept["environment"]["name"].removeprefix("NVIDIA "))
            for name, seen in kept["steps"].items():
                if CASES[name].get("compile") or names is not None and name not in names:
                    continue
                before = seen["before"].get("seconds")
                now = planned(step_of(name), gpu).get("seconds")
                found.append(_row(gpu.name, group_of(name), name, seen["seconds"], before, now))
        for path in sorted((record.RESULTS / "steps").glob("*.json")) if names is None else ():
            kept = json.loads(path.read_text(encoding="utf8"))
            if kept["environment"]["device"] != "cuda":
                continue
            gpu = gpus.find(kept["environment"]["name"].removeprefix("NVIDIA "))
            for step in kept["steps"]:
                now = plan(Recipe(**step["recipe"])).seconds(gpu.name).total
                name = f"{step['model']}, {step['technique']}"
                before = step["planned_seconds"]
                found.append(_row(gpu.name, RECIPES, name, step["seconds"], before, now))
    return found


def _row(
    gpu: str, group: str, step: str, measured: float, before: float | None, now: float | None
) -> dict[str, str]:
    told = [NO_PLAN if seconds is None else f"{seconds:.5f}" for seconds in (before, now)]
    return {
        "GPU": gpu, "group": group, "step": step, "seconds": f"{measured:.5f}",
        "planned before": told[0], "planned": told[1],
    }  # fmt: skip


def read() -> list[dict[str, str]]:
    """The kept rows."""
    return gpu_models_table.read(PAGE)


def summary(table: Sequence[dict[str, str]]) -> list[str]:
    """The lines of docs/gpu-time.md's table: the errors of each group, before and now."""
    lines = ["| mean, median, worst error | steps | before | now |", "|---|---|---|---|"]
    for group in GROUPS:
        some = [row for row in table if row["group"] == group]
        before, now = (_errors(some, when) for when in ("planned before", "planned"))
        lines.append(f"| {group} | {len(some)} | {before} | {now} |")
    return lines


def _errors(table: Sequence[dict[str, str]], when: str) -> str:
    found = [off(row["seconds"], row[when]) for row in table]
    errors = [error for error in found if error is not None]
    sizes = list(map(abs, errors))
    worst = max(errors, key=abs)
    return f"{statistics.mean(sizes):.1%}, {statistics.median(sizes):.1%}, {worst:+.1%}"


def main(arguments: list[str] | None = None) -> int:
    """Print the errors, and keep them where asked to; two minutes of CPU time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_seconds")
    parser.add_argument("--write", action="store_true", help="the data and the page's table anew")
    asked = parser.parse_args(arguments)
    table = rows()
    if asked.write:
        PAGE.write_text(gpu_models_table.as_csv(table), encoding="utf8")
        text = with_block(TOLD.read_text(encoding="utf8"), "h200", "\n".join(summary(table)))
        TOLD.write_text(text, encoding="utf8")
    shown = [
        {"step": row["step"], "seconds": row["seconds"],
         **{when: in_percent(off(row["seconds"], row[when]), 1)
            for when in ("planned before", "planned")}}
        for row in table
    ]  # fmt: skip
    print(Table(shown))
    print("\n".join(summary(table)))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m benchmarks.gpu_seconds"))

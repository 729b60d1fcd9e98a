"""Seconds of real steps on our own GPUs beside their plans: docs/data/gpu-seconds.csv.

    python -m benchmarks.gpu_seconds [--write]

The steps are those of results/models and results/steps, whose files also hold what the planner of
that day said. Compiled steps are left out, as others were being compiled beside them.
`tight_fit/gpus/rates.py` says to which of them constants were fitted: their groups are named
"fitted" here, and nothing was fitted to the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import pandas as pd

from benchmarks import gpu_models_table, proof
from benchmarks.comparison import Errors
from benchmarks.gpu_model_cases import CASES, step_of
from benchmarks.gpu_models import planned
from benchmarks.gpu_models_table import BEFORE, NOW, gpu_of
from benchmarks.pages import with_block
from helpers import record
from helpers.plan import plan
from tight_fit import gpus
from tight_fit.command.wrapper import run
from tight_fit.gpus import calibration

NAME = "python -m benchmarks.gpu_seconds"
PAGE = record.RESULTS.parent / "docs" / "data" / "gpu-seconds.csv"
TOLD = PAGE.parents[1] / "gpu-time.md"
QWEN, SINGLE = "Qwen3-0.6B, fitted", "GPT-2, ResNet-50: a constant fitted to each"
OTHERS, RECIPES = "other models, held out", "the course's recipes, held out"
GROUPS = (QWEN, SINGLE, OTHERS, RECIPES)
COLUMNS = ("GPU", "group", "step", "seconds", BEFORE, NOW)


def group_of(name: str) -> str:
    """The group of a step of results/models."""
    if name.startswith("Qwen3-0.6B"):
        return QWEN
    return SINGLE if name in ("GPT-2 medium", "ResNet-50") else OTHERS


def rows(names: Sequence[str] | None = None) -> pd.DataFrame:
    """A row per step: seconds measured, planned before and planned anew, none without a plan.

    names  only these steps of results/models, and no recipe; None takes all
    """
    with calibration.chosen(calibration.NONE):
        found = list(_of_models(names)) + (list(_of_recipes()) if names is None else [])
    return pd.DataFrame(found, columns=COLUMNS).round(5)


def _of_models(names: Sequence[str] | None) -> Iterator[tuple]:
    for kept in gpu_models_table.files():
        gpu = gpu_of(kept)
        for name, seen in kept["steps"].items():
            if CASES[name].get("compile") or names is not None and name not in names:
                continue
            before, now = (
                told.get("seconds") for told in (seen["before"], planned(step_of(name), gpu))
            )
            yield gpu.name, group_of(name), name, seen["seconds"], before, now


def _of_recipes() -> Iterator[tuple]:
    for kept in proof.read():
        if kept.environment["device"] == "cuda":
            gpu = gpus.find(kept.environment["name"].removeprefix("NVIDIA ")).name
            for step in kept.steps:
                name = f"{step.model}, {step.technique}"
                now = plan(step.recipe).seconds(gpu).total
                yield gpu, RECIPES, name, step.seconds, step.planned_seconds, now


def read() -> pd.DataFrame:
    """The kept rows."""
    return pd.read_csv(PAGE)


def summary(table: pd.DataFrame) -> list[str]:
    """The lines of docs/gpu-time.md's table: the errors of each group, before and now."""
    lines = ["| mean, median, worst error | steps | before | now |", "|---|---|---|---|"]
    for group in GROUPS:
        some = table[table["group"] == group]
        before, now = (_errors(some[when] / some["seconds"] - 1) for when in (BEFORE, NOW))
        lines.append(f"| {group} | {len(some)} | {before} | {now} |")
    return lines


def _errors(found: pd.Series) -> str:
    errors = Errors.of(found.dropna())
    return f"{errors.mean:.1%}, {errors.median:.1%}, {errors.worst:+.1%}"


def main(arguments: list[str] | None = None) -> int:
    """Print the errors, and keep them where asked to; two minutes of CPU time."""
    parser = argparse.ArgumentParser(prog=NAME)
    parser.add_argument("--write", action="store_true", help="the data and the page's table anew")
    asked = parser.parse_args(arguments)
    if asked.write:
        gpu_models_table.refuse_other_releases()
    table = rows()
    if asked.write:
        PAGE.write_text(table.to_csv(index=False, float_format="%.5f"), encoding="utf8")
        text = with_block(TOLD.read_text(encoding="utf8"), "h200", "\n".join(summary(table)))
        TOLD.write_text(text, encoding="utf8")
    print(table.drop(columns=["GPU", "group"]).to_string(na_rep="no plan"))
    print("\n".join(summary(table)))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, NAME))

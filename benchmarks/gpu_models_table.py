"""Measured memory of other people's models beside their plans: docs/data/gpu-models.csv.

    python -m benchmarks.gpu_models_table [--write]

`benchmarks.gpu_models` measured them; their files in results/models hold, beside each step, what
the planner of that day said of it ("before"). Planned anew, they show what was mended since. Their
seconds are in `benchmarks.gpu_seconds`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import pandas as pd

from benchmarks.comparison import Errors
from benchmarks.gpu_model_cases import CASES, step_of
from benchmarks.gpu_models import planned
from helpers import record
from tight_fit import gpus
from tight_fit.command.wrapper import run
from tight_fit.units import MIB

NAME = "python -m benchmarks.gpu_models_table"
FOLDER = record.RESULTS / "models"
PAGE = record.RESULTS.parent / "docs" / "data" / "gpu-models.csv"
SAME = 1.01 * MIB  # a plan that misses by less counts as equal: a process holds so much beside
KINDS = ("allocated", "reserved")
BEFORE, NOW = "planned before", "planned"

SENTENCES = (
    "**Against other models on {gpu}.** {count} steps of {models} models of transformers, from "
    "LoRA to offloading ({date}, PyTorch {torch}). The planner of that day was within 1 MiB of "
    "the allocated peak in {same} of them, and missed {before}. Causes were found there and "
    "mended: planned with the releases that were measured ({releases}) it is within 1 MiB in "
    "{same_now}, and misses {now}. [data/gpu-models.csv](data/gpu-models.csv) has every step.\n\n"
)
MISSES = "it by {:.2%} in the mean ({:+.1%} at worst: {}) and the reserved peak by {:.1%}"


def files() -> list[dict[str, Any]]:
    """What results/models holds, a GPU each."""
    return [json.loads(path.read_text(encoding="utf8")) for path in sorted(FOLDER.glob("*.json"))]


def gpu_of(kept: dict[str, Any]) -> gpus.GPU:
    """The GPU of a file."""
    return gpus.find(kept["environment"]["name"].removeprefix("NVIDIA "))


def rows(names: Sequence[str] | None = None) -> pd.DataFrame:
    """A row per measured step: bytes measured, planned before, and planned anew; none where the
    planner refused the step.

    names  only these steps; None takes all
    """
    found = []
    for kept in files():
        gpu = gpu_of(kept)
        for name, seen in kept["steps"].items():
            if names is not None and name not in names:
                continue
            plans = {BEFORE: seen["before"], NOW: planned(step_of(name), gpu)}
            row = {"GPU": gpu.name, "step": name, "model": CASES[name]["model"]}
            for kind in KINDS:
                row[kind] = seen[kind]
                row |= {f"{kind}, {when}": plan.get(kind) for when, plan in plans.items()}
            row["planned with"] = releases()
            shared = seen.get("together")
            row["process"] = "shared with the steps above" if shared else "of its own"
            found.append(row)
    return pd.DataFrame(found).convert_dtypes()


def releases() -> str:
    """Those that a plan depends on, of this environment."""
    names = ("torch", "transformers")
    return " and ".join(f"{name} {version(name).split('+')[0]}" for name in names)


def refuse_other_releases() -> None:
    """Raises ValueError where this environment plans by other releases than those measured.

    What is then fused or kept differs, and the page would compare it with another step.
    """
    wanted = " and ".join(sorted(set(read()["planned with"])))
    if wanted != releases():
        raise ValueError(
            f"Steps were measured with {wanted}, and this environment has {releases()}: install "
            "those releases to write the rows anew."
        )


def read() -> pd.DataFrame:
    """The kept rows."""
    return pd.read_csv(PAGE)


def errors(table: pd.DataFrame, kind: str, when: str) -> pd.Series:
    """Planned / measured - 1 by step, of those that have a plan; when is `BEFORE` or `NOW`."""
    by_step = table.set_index("step")
    return (by_step[f"{kind}, {when}"] / by_step[kind] - 1).dropna().astype(float)


def sentences() -> str:
    """What docs/accuracy.md says of memory; "" where no GPU was measured."""
    told = ""
    table = read() if PAGE.exists() else pd.DataFrame()
    for kept in files():
        gpu = kept["environment"]["name"]
        mine = table[table["GPU"] == gpu.removeprefix("NVIDIA ")]
        told += SENTENCES.format(
            gpu=f"our {gpu}",
            count=len(mine),
            models=mine["model"].nunique(),
            date=kept["date"][:10],
            torch=kept["environment"]["torch"].split("+")[0],
            same=_same(mine, BEFORE),
            same_now=_same(mine, NOW),
            before=_misses(mine, BEFORE),
            now=_misses(mine, NOW),
            releases=mine["planned with"].iloc[0],
        )
    return told


def short() -> str:
    """The same in half a sentence, for README: all GPUs together."""
    table = read()
    before, now = (errors(table, "allocated", when).abs().mean() for when in (BEFORE, NOW))
    names = ", ".join(table["GPU"].unique())
    return f"our {names}'s by {before:.1%}, now {now:.1%} ({len(table)})"


def _same(table: pd.DataFrame, when: str) -> int:
    return int(((table[f"allocated, {when}"] - table["allocated"]).abs() <= SAME).sum())


def _misses(table: pd.DataFrame, when: str) -> str:
    allocated, reserved = (Errors.of(errors(table, kind, when)) for kind in KINDS)
    told = MISSES.format(allocated.mean, allocated.worst, allocated.name, reserved.mean)
    refused = len(table) - allocated.count
    return f"{told} ({refused} had no plan)" if refused else told


def main(arguments: list[str] | None = None) -> int:
    """Print the misses, and keep them where asked to; a minute and a half of CPU time."""
    parser = argparse.ArgumentParser(prog=NAME)
    parser.add_argument("--write", action="store_true", help="docs/data/gpu-models.csv anew")
    asked = parser.parse_args(arguments)
    if asked.write:
        refuse_other_releases()
    table = rows()
    if asked.write:
        PAGE.write_text(table.to_csv(index=False), encoding="utf8")
    shown = {
        f"{kind}, {when}": errors(table, kind, when) for kind in KINDS for when in (BEFORE, NOW)
    }
    print(pd.DataFrame(shown).to_string(float_format="{:+.2%}".format, na_rep="no plan"))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, NAME))

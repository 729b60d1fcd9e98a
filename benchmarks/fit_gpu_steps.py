"""Fit what no published kernel times show from published whole steps: tensor cores, convolutions,
batch norm.

    python -m benchmarks.fit_gpu_steps steps.csv FOLDER kernels.parquet [--write]

steps.csv holds timm's results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv (github
huggingface/pytorch-image-models, Apache-2.0) with columns source, card, model, length, batch,
layout, total_ms; FOLDER what `benchmarks.timm_steps` traced. Fitted are the steps of every third
family of models by alphabet; the others are held out. All constants begin at a stated guess and are
held to it (a penalty on the square of their logarithm), so that one that few steps speak of stays
near it.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from benchmarks.comparison import write_constants
from benchmarks.timm_steps import traces
from tight_fit.command.wrapper import run as run_command
from tight_fit.gpus.specs import SPECS
from tight_fit.kernels.kernel_time import constants, kernel_seconds
from tight_fit.kernels.op import Op

PREFIX = re.compile(r"^(tf|gluon|ssl|swsl|ig|jx|legacy|adv|ens|tv|gc|gcr|dm|ese|seresnextaa)_")
# (where in constants.json's "shared", guess, most it may become)
FITTED = (
    (("tensor", "efficiency"), 1.0, 1.1),
    (("tensor", "small_tile"), 20.0, 100.0),
    (("tensor", "start"), 16.0, 128.0),
    (("convolution", "weights"), 0.9, 1.0),
    (("convolution", "small_tile"), 20.0, 100.0),
    (("convolution", "moving"), 0.9, 1.1),
    (("convolution", "turning"), 2.0, 4.0),
    (("convolution", "slow_groups"), 0.08, 1.0),
    (("moving", "batch_norm nchw"), 1.0, 2.0),
    (("moving", "batch_norm nhwc"), 1.0, 2.0),
    (("moving", "reduction"), 0.5, 1.1),
    (("moving", "transpose"), 0.5, 1.1),
    (("depthwise", "moving"), 0.6, 1.1),
    (("depthwise", "nchw"), 0.04, 1.0),
    (("depthwise", "nhwc"), 0.08, 1.0),
    (("depthwise", "nchw/weights"), 0.03, 1.0),
    (("depthwise", "nhwc/weights"), 0.06, 1.0),
    (("gap",), 2e-6, 10e-6),
)
PENALTY = 0.1
GPU = "RTX 3090"


class Steps(NamedTuple):
    """Published steps with their kernels: `rows` of steps.csv, seconds [steps], and for every
    distinct kernel of a step its place in `ops`, the step and how often it runs."""

    rows: list[dict]
    seconds: np.ndarray
    ops: list[Op]
    place: np.ndarray
    step: np.ndarray
    times: np.ndarray


def family(model: str) -> str:
    """A model's family: the letters its name begins with, without who trained it."""
    return re.match(r"[a-z]+", PREFIX.sub("", model)).group(0)


def read(steps: Path, folder: Path) -> Steps:
    """The steps of timm's benchmark that could be traced."""
    rows, known, parts = [], {}, []
    for row, traced in traces(steps, folder):
        for (op, _), times in traced.counted().items():
            parts.append((known.setdefault(op, len(known)), len(rows), times))
        rows.append(row)
    place, step, times = np.array(parts).T
    measured = np.array([float(row["total_ms"]) / 1e3 for row in rows])
    return Steps(rows, measured, list(known), place, step, times)


def predicted(steps: Steps, known: dict) -> np.ndarray:
    """Seconds of each step: its kernels one after another (none of these steps waits for the
    CPU)."""
    each = kernel_seconds(steps.ops, SPECS[GPU], known=known)
    return np.bincount(steps.step, each[steps.place] * steps.times, len(steps.rows))


def with_values(known: dict, point) -> dict:
    """The constants with the fitted ones at their guess times e to the power of `point`."""
    new = copy.deepcopy(known)
    for (where, guess, most), x in zip(FITTED, point):
        table = new["shared"]
        for name in where[:-1]:
            table = table.setdefault(name, {})
        table[where[-1]] = float(min(guess * np.exp(x), most))
    return new


def fit(steps: Steps, chosen: np.ndarray, evaluations: int) -> dict:
    known = constants()

    def loss(point):
        missed = np.abs(np.log(predicted(steps, with_values(known, point)) / steps.seconds))
        return missed[chosen].mean() + PENALTY * np.mean(np.square(point))

    simplex = np.vstack([np.zeros(len(FITTED)), np.eye(len(FITTED)) * 0.3])
    limits = {"maxfev": evaluations, "fatol": 1e-5, "adaptive": True}
    options = {"initial_simplex": simplex, **limits}
    found = minimize(loss, simplex[0], method="Nelder-Mead", options=options)
    return with_values(known, found.x)


def dispatch(kernels: pd.DataFrame) -> dict:
    """Seconds the CPU takes for an operation.

    kernel   what it was measured to take from an event to the start of an elementwise kernel
             (`benchmarks.fit_gpu_times`), the median over the hosts; half of it is taken to be the
             launch, half the dispatch
    further  each further kernel of the same operation is a launch alone
    view     has no kernel: the dispatch alone, times what a view takes of an addition on a CPU
    """
    import timeit

    import torch

    from benchmarks.fit_gpu_times import L2, MEASURED, rows
    from benchmarks.fit_gpu_times import fit as fit_kind

    delays = []
    for gpu in MEASURED:
        some = rows(kernels, "elementwise", gpu)
        some = some[some.op.isin(["add", "mul", "div"])]
        delays.append(
            fit_kind("elementwise", some.sample(2000, random_state=0), gpu, {"l2": L2})["delay"]
        )
    one = torch.zeros(1, 1)
    view, add = (
        min(timeit.repeat(run, number=20000, repeat=5))
        for run in (lambda: one.view(1), lambda: one + one)
    )
    kernel = float(np.median(delays))
    return {
        "kernel": round(kernel, 7),
        "view": round(kernel * min(1.0, view / add) / 2, 7),
        "further": round(kernel / 2, 7),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--evaluations", type=int, default=1500)
    parser.add_argument(
        "--write", action="store_true", help="write tight_fit/kernels/constants.json anew"
    )
    given = parser.parse_args()
    steps = read(given.steps, given.folder)
    families = np.array([family(row["model"]) for row in steps.rows])
    chosen = np.isin(families, sorted(set(families))[::3])
    found = fit(steps, chosen, given.evaluations)
    found["shared"]["dispatch"] = dispatch(pd.read_parquet(given.kernels))
    error = predicted(steps, found) / steps.seconds - 1
    table = pd.DataFrame(
        {
            "family": families,
            "layout": [row["layout"] or "channels first" for row in steps.rows],
            "fitted": chosen,
            "error": error,
        }
    )
    errors = {"steps": "size", "mean": "mean", "mean_absolute": lambda e: e.abs().mean()}
    print(table.groupby(["fitted", "layout"]).error.agg(**errors))
    print(table.groupby(["family", "layout"]).error.mean().unstack().round(3).to_string())
    print(json.dumps(found["shared"], indent=1))
    if given.write:
        found["fitted families"] = sorted(set(families[chosen].tolist()))
        write_constants(lambda kept: _rounded(found))


def _rounded(value):
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m benchmarks.fit_gpu_steps"))

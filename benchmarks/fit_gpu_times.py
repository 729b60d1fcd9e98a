"""Fit the constants of the machine model from published kernel times, and show what is left over.

    python -m benchmarks.fit_gpu_times kernels.parquet [--write]

The data: NeuSight (Lee, Phanishayee, Mahajan 2025, arXiv 2407.13853; github sitar-lab/NeuSight,
commit 6945927, MIT), fp32 kernels without TF32 on T4, P4, P100, V100 and A100 as rows (op, ms,
card, b, h, m, n, k). Each row is a single launch between two events on an idle GPU. So a row is the
longer of two: `floor`, what the CPU takes from the first event to the second, and `delay`, what it
takes until the kernel starts, plus the kernel. Both are fitted for every class of operation and
left out of the model: in a step the CPU runs ahead.

Four of five rows are fitted; residuals are those of the fifth. A second table fits each GPU by the
constants of the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize

from benchmarks.comparison import write_constants
from benchmarks.published_times import FITTED
from tight_fit.command.wrapper import run as run_command
from tight_fit.gpus.specs import MEASURED, SPECS
from tight_fit.kernels import kernel_time
from tight_fit.kernels.kernel_time import moving_seconds, tiled_seconds

PASSES = dict.fromkeys("add mul div pow".split(), 3) | dict.fromkeys(
    "addu mulu divu powu relu gelu tanh".split(), 2
)
PRODUCT = ("efficiency", "small_tile", "alone", "start")
BOUNDS = {
    "efficiency": (0.05, 1.0),
    "small_tile": (0.0, 100.0),
    "alone": (1.0, 4.0),
    "start": (0.0, 128.0),
}
ROWS = 4000  # of each class and GPU that are fitted: more changes nothing but the time


def rows(kernels: pd.DataFrame, kind: str, gpu: str) -> pd.DataFrame:
    """The rows of a class of the model on a GPU, with `moved` (bytes) and `seconds`."""
    card = next(card for card, name in FITTED.items() if name == gpu)
    some = kernels[kernels.card == card]
    if kind in ("linear", "batched"):
        return some[some.op == {"linear": "linear", "batched": "bmm"}[kind]].assign(
            seconds=lambda s: s.ms / 1e3
        )
    if kind == "elementwise":
        some = some[some.op.isin(list(PASSES))]
        passes = some.op.astype(str).map(PASSES)
    else:
        some = some[some.op == ("ln" if kind == "norm" else "softmax")]
        if kind != "norm":
            some = some[(some.h > kernel_time.WIDE) == (kind == "wide_softmax")]
        passes = 2
    return some.assign(seconds=some.ms / 1e3, moved=4.0 * some.b * some.h * passes)


def predicted(kind: str, some: pd.DataFrame, gpu: str, values: dict) -> np.ndarray:
    """Seconds of the rows: the longer of the floor, and the delay plus the kernel."""
    spec = SPECS[gpu]
    if kind in ("linear", "batched"):
        shape = tuple(
            some[name].to_numpy(float) for name in ("b", "m", "k", "n")
        )  # (m, n) by (n, k)
        kernel = tiled_seconds(
            shape,
            4,
            spec.sms,
            spec.fp32,
            spec.bandwidth * values["moving"],
            **{name: values[name] for name in PRODUCT},
        )
    else:
        kernel = moving_seconds(
            some.moved.to_numpy(), spec.bandwidth, values["share"], spec.l2, values["l2"]
        )
    return np.maximum(values["floor"], values["delay"] + kernel)


def fit(kind: str, some: pd.DataFrame, gpu: str, fixed: dict) -> dict:
    """The constants of a class on a GPU that make the mean of |log(predicted / measured)| least."""
    names = (
        (*PRODUCT, "floor", "delay")
        if kind in ("linear", "batched")
        else ("share", "floor", "delay")
    )
    names = tuple(name for name in names if name not in fixed)
    low = float(some.seconds.quantile(0.02))
    starts = {
        "efficiency": 0.8,
        "small_tile": 15.0,
        "alone": 1.2,
        "start": 8.0,
        "share": 0.75,
        "floor": low,
        "delay": low / 2,
    }
    measured = some.seconds.to_numpy()

    def values(point):
        found = dict(fixed)
        for name, x in zip(names, point):
            found[name] = float(np.clip(np.exp(x) * starts[name], *BOUNDS.get(name, (0.0, np.inf))))
        return found

    def loss(point):
        return float(np.abs(np.log(predicted(kind, some, gpu, values(point)) / measured)).mean())

    best = None
    for step in (0.3, -0.3):
        simplex = np.vstack([np.zeros(len(names)), np.eye(len(names)) * step])
        found = minimize(
            loss,
            simplex[0],
            method="Nelder-Mead",
            options={"initial_simplex": simplex, "maxiter": 500, "xatol": 2e-3, "fatol": 1e-5},
        )
        best = found if best is None or found.fun < best.fun else best
    return values(best.x)


def error(kind, some, gpu, values) -> np.ndarray:
    return predicted(kind, some, gpu, values) / some.seconds.to_numpy() - 1


KINDS = ("elementwise", "softmax", "wide_softmax", "norm", "linear", "batched")


def fit_all(kernels: pd.DataFrame) -> dict[str, dict[str, dict]]:
    """{GPU: {class: constants}}."""
    found: dict[str, dict[str, dict]] = {}
    for gpu in MEASURED:
        found[gpu] = {}
        for kind in KINDS:
            some = rows(kernels, kind, gpu)
            train = some[some.index % 5 != 0]
            train = train.sample(min(ROWS, len(train)), random_state=0)
            fixed = (
                {"moving": found[gpu]["elementwise"]["share"]}
                if kind in ("linear", "batched")
                else {"l2": L2}
            )
            found[gpu][kind] = fit(kind, train, gpu, fixed)
    return found


L2 = 2.5  # times as fast as memory; the elementwise rows are fitted as well from 2 to 4


def residuals(kernels: pd.DataFrame, found: dict) -> pd.DataFrame:
    """Mean and mean absolute error of held-out rows by class and GPU, and by the other GPUs'
    constants (median)."""
    table = []
    for gpu in MEASURED:
        for kind in KINDS:
            some = rows(kernels, kind, gpu)
            some = some[some.index % 5 == 0]
            own = error(kind, some, gpu, found[gpu][kind])
            others = [found[other][kind] for other in MEASURED if other != gpu]
            lent = {
                name: float(np.median([values[name] for values in others])) for name in others[0]
            }
            lent |= {name: found[gpu][kind][name] for name in ("floor", "delay")}  # of the CPU
            away = error(kind, some, gpu, lent)
            table.append(
                {
                    "class": kind,
                    "gpu": gpu,
                    "rows": len(some),
                    "mean": own.mean(),
                    "mean absolute": np.abs(own).mean(),
                    "worst of 100": np.quantile(np.abs(own), 0.99),
                    "never fitted": np.abs(away).mean(),
                }
            )
    return pd.DataFrame(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="write tight_fit/kernels/constants.json anew"
    )
    given = parser.parse_args()
    kernels = pd.read_parquet(given.kernels)
    found = fit_all(kernels)
    print(
        residuals(kernels, found).to_string(index=False, float_format=lambda value: f"{value:.3f}")
    )
    for gpu, kinds in found.items():
        for kind, values in kinds.items():
            print(
                f"{gpu:10s} {kind:13s}",
                "  ".join(
                    f"{name} {value * 1e6:.1f} us"
                    if name in ("floor", "delay")
                    else f"{name} {value:.3f}"
                    for name, value in values.items()
                ),
            )
    if given.write:
        write_constants(lambda kept: kept | {"gpus": {gpu: _kept(found[gpu]) for gpu in found}})


def _kept(kinds: dict[str, dict]) -> dict[str, dict]:
    """What constants.json holds of a GPU."""
    tiled = {kind: {name: round(kinds[kind][name], 4) for name in PRODUCT} for kind in KINDS[4:]}
    return {"moving": {kind: round(kinds[kind]["share"], 4) for kind in KINDS[:4]}, **tiled}


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m benchmarks.fit_gpu_times"))

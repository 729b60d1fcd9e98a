"""Plans beside what was measured: how far they are off, and plans as they were made last.

A step that takes long to plan is planned once; data/NAME.json keeps what came out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.pages import DATA
from tight_fit.kernels import kernel_time


class Errors(NamedTuple):
    """Of errors, planned / measured - 1: mean and median of their sizes, the largest with its sign,
    the step that has it, and how many there are."""

    mean: float
    median: float
    worst: float
    name: str
    count: int

    @classmethod
    def of(cls, found: pd.Series | pd.DataFrame) -> Errors:
        """Of errors by step, or of rows with a `step` and its `error`. Raises ValueError for
        none."""
        if isinstance(found, pd.DataFrame):
            found = found.set_index("step")["error"]
        sizes = found.abs()
        most = int(sizes.argmax())
        return cls(sizes.mean(), sizes.median(), found.iloc[most], found.index[most], len(sizes))


def read(name: str) -> dict[str, dict[str, Any]]:
    """{name of a step: what its plan gave} of data/NAME.json."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf8"))


def make(
    name: str, plans: Mapping[str, Callable[[], dict[str, Any]]], order: Sequence[str]
) -> None:
    """Make plans, keep and print each as soon as it is there; those of other steps stay.

    order  the names of all steps; what is kept of others goes
    """
    for step, plan in plans.items():
        found = read(name) | {step: plan()}
        ordered = {known: found[known] for known in order if known in found}
        (DATA / f"{name}.json").write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf8")
        print(f"{step}: {found[step]}", flush=True)


def write_constants(change: Callable[[dict], dict]) -> None:
    """Write tight_fit/kernels/constants.json anew, as `change` makes it of what it holds."""
    path = Path(kernel_time.__file__).parent / "constants.json"
    kept = json.loads(path.read_text(encoding="utf8"))
    path.write_text(json.dumps(change(kept), indent=1) + "\n", encoding="utf8")

"""All points with their plans as they were made last, and those that were left out after their plan
was seen, with the reason.

data/peaks.csv has the points: what was measured, and which function sets the step up. Planning all
of them takes half an hour, so data/peaks.json keeps what came out; the tests plan some of them
again. `python -m benchmarks.peaks` makes the file and docs/accuracy.md anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial

import pandas as pd

from benchmarks import comparison
from benchmarks.pages import records
from benchmarks.peaks import attention_tables, known, litgpt, litgpt_hub, others, small_gpt, vit
from benchmarks.peaks.point import OWN_GPUS, Point, Setup
from tight_fit.gpus import find
from tight_fit.models.step import ModelStep

ALLOCATED, RESERVED = "allocated", "reserved"
MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (attention_tables, known, litgpt, litgpt_hub, others, small_gpt, vit)
}


def _point(row: dict[str, str]) -> Point:
    numbers = {
        name: json.loads(value) if (value := row[name]) else None
        for name in "allocated reserved steps ranks tokens_per_second parameters own_error".split()
    }
    gpu = OWN_GPUS.get(row["gpu"]) or find(row["gpu"])
    setup, behaves = _setup(row["setup"], row["arguments"]), row["behaves"] or None
    named = {name: row[name] for name in ("name", "source", "release")}
    return Point(gpu=gpu, setup=setup, behaves=behaves, **named, **numbers)


def _setup(name: str, arguments: str) -> Setup | ModelStep:
    """What a module's function gives for the arguments, or the function itself without any."""
    if name == "ModelStep":
        return ModelStep.of(**json.loads(arguments))
    module, _, function = name.partition(".")
    made = getattr(MODULES[module], function)
    return made(**json.loads(arguments)) if arguments else made


POINTS: tuple[Point, ...] = tuple(
    map(_point, records("peaks.csv", dtype=str, keep_default_na=False).to_dict("records"))
)
# Start of the names of points -> why their set-up is not what was measured.
_REASONS = {
    "Pythia": "Pythia-410M (6 figures, seen from -7 % to -21 %): transformers of 2024 kept a "
    "causal mask of 4 MiB in each layer, and computed attention otherwise.",
    "OPT": "OPT-350M (6 figures, seen from -0.02 % to -22 %): transformers of 2024 computed its "
    "softmax in fp32 beside fp16 weights, and attention otherwise.",
    "ALBERT": "ALBERT-base (6 figures, seen from +16 % to +20 %): the page does not say which "
    "checkpoint was measured. The second version, the default of its script, keeps much more than "
    "the first, which its example names.",
}
LEFT_OUT: dict[str, str] = {
    point.name: reason
    for start, reason in _REASONS.items()
    for point in POINTS
    if point.name.startswith(start)
}


def read() -> dict[str, dict[str, int]]:
    """{name of a point: {"allocated": bytes, "reserved": bytes}} by plan."""
    return comparison.read("peaks")


def make(points: Iterable[Point]) -> None:
    """Plan points and keep the results; those of other points stay, those of none go."""
    plans = {point.name: partial(_kept, point) for point in points}
    comparison.make("peaks", plans, [point.name for point in POINTS])


def _kept(point: Point) -> dict[str, int]:
    peaks = point.planned()
    return {ALLOCATED: peaks.allocated, RESERVED: peaks.reserved}


def misses() -> pd.DataFrame:
    """Every published figure and its plan, in the order of `POINTS`: the name of the step, GPU,
    release ("" where it is not stated), which peak, bytes measured and planned, planned / measured
    - 1 as `error`, `why` it does not count ("" where it does), the source, and `tensors`, the bytes
    that the plan allocates.

    Points that are left out need no kept plan. Raises KeyError for another that has none.
    """
    planned = read()
    figures = [
        (point, kind, measured)
        for point in POINTS
        if point.name in planned or point.name not in LEFT_OUT
        for kind, measured in ((ALLOCATED, point.allocated), (RESERVED, point.reserved))
        if measured is not None
    ]
    rows = [
        {
            "step": point.name,
            "GPU": point.gpu.name,
            "release": point.release,
            "peak": kind,
            "planned": planned[point.name][kind],
            "error": planned[point.name][kind] / measured - 1,
            "why": LEFT_OUT.get(point.name, ""),
            "source": point.source,
            "tensors": planned[point.name][ALLOCATED],
        }
        for point, kind, measured in figures
    ]
    exact = pd.Series([measured for *_, measured in figures], dtype=object)  # bytes, or rounded
    return pd.DataFrame(rows).assign(measured=exact)

"""A run with its provenance: trained, evaluated, measured and planned, to JSON and back."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from helpers import measure
from helpers.plan import or_explain, plan
from helpers.profile import environment
from helpers.recipe import Recipe
from helpers.train import TrainResult, encoded, evaluate, fit
from tight_fit import gpus
from tight_fit.checks import of_type, shown
from tight_fit.files import replace_all
from tight_fit.gpus.specs import of_device
from tight_fit.memory.plan import Plan

RUNS = "TIGHT_FIT_RUNS"  # a folder: every named run is also written there
COMMAND = "TIGHT_FIT_COMMAND"  # what the reader typed, for the record
RESULTS = Path(__file__).parent.parent / "results"
VERSION = 1
NAME = re.compile(r"[\w-]+/[\w-]+", re.ASCII)
UNNAMED = "unnamed"
WARM_UP = 3  # steps whose times are left out of the median


@dataclass(frozen=True)
class Run:
    """One fine-tune, as it is kept in a record.

    name         "<notebook>/<label>"
    recipe       every field; `weights` says whether the accuracy is that of pretrained weights
    environment  device, driver, versions, threads (`profile.environment`)
    plan         {"target", "peak" (bytes), "at_peak" {category: bytes}, "flops" {phase: count per
                 step}}; on a GPU also "allocated" and "reserved" (bytes, `Plan.allocator_peaks`),
                 and "seconds" of a step (`Plan.seconds`; None for a GPU that is not known)
    memory       {"tracked", "allocated", "reserved", "device"} in bytes, None where there is no
                 such figure, and "at_peak" {category: bytes} of the tracked pass
    losses       mean loss of each optimizer step
    seconds      wall-clock seconds of each optimizer step
    rows         examples of each optimizer step
    skipped      the steps (from 0) that changed nothing because a gradient overflowed in fp16
    accuracy     on the test split, 0 to 1
    train_rows, test_rows  examples of the splits used
    date, command          when (UTC, ISO 8601) and by which command
    """

    name: str
    recipe: Recipe
    environment: dict
    plan: dict
    memory: dict
    losses: list[float]
    seconds: list[float]
    rows: list[int]
    skipped: list[int]
    accuracy: float
    train_rows: int
    test_rows: int
    date: str
    command: str
    version: int = field(default=VERSION)

    @property
    def step_seconds(self) -> float:
        """Median seconds of an optimizer step, the first ones left out."""
        return statistics.median(self.seconds[WARM_UP:] or self.seconds)

    @property
    def rows_per_second(self) -> float:
        """Median examples per step over `step_seconds`."""
        return statistics.median(self.rows) / self.step_seconds

    @property
    def peak(self) -> int:
        """Measured bytes at the peak: CUDA's allocated peak, or the tracker's without CUDA."""
        return self.memory["allocated"] or self.memory["tracked"]

    @property
    def miss(self) -> float:
        """(planned peak - measured peak) / measured peak."""
        return self.planned / self.peak - 1

    @property
    def planned(self) -> int:
        """Planned bytes of what `peak` measures."""
        return self.plan.get("allocated", self.plan["peak"])

    @property
    def planned_seconds(self) -> float | None:
        """Planned seconds of a step of examples of full length, beside `step_seconds`.

        None without a GPU, on one whose speed is not known, and in records of before.
        """
        return self.plan.get("seconds")

    @property
    def accuracy_label(self) -> str:
        """How to call the accuracy, so that no reader takes it for a pretrained model's."""
        return "accuracy" if self.recipe.weights == "pretrained" else "accuracy (random weights)"

    def to_json(self) -> str:
        """The text of a record. Raises ValueError where a number is NaN or infinite."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["recipe"] = self.recipe.to_dict()
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Run:
        """The run of `to_json`.

        Other texts are refused by `tools.course.records`, before a record is kept.
        """
        values = json.loads(text)
        return cls(**(values | {"recipe": Recipe.from_dict(values["recipe"])}))


def run(
    recipe: Recipe,
    name: str | None = None,
    device: str | None = None,
    keep_model: bool = False,
) -> Run | tuple[Run, TrainResult]:
    """Fine-tune, evaluate, measure memory in a pass of its own, and plan: all about one recipe.

    name        "<notebook>/<label>"; with it, and TIGHT_FIT_RUNS set, the run is also written to
                that folder
    device      "cuda" or "cpu"; None takes the GPU if there is one
    keep_model  also return the TrainResult, which holds the model (and its memory)
    Raises ValueError for a name that is none, what `train.fit` raises, and
    plan.out_of_memory.OutOfMemory, which says what would fit.
    """
    of_type("recipe", recipe, Recipe)
    device = str(gpus.device(device))
    if name is not None:
        check_name(name)
    data = encoded(recipe)
    measured = or_explain(recipe, lambda: measure.measure(recipe, data["train"], device))
    trained = or_explain(recipe, lambda: fit(recipe, data["train"], device))
    finished = Run(
        name=name or UNNAMED,
        recipe=recipe,
        environment=environment(device),
        plan=plan_of(recipe, device),
        memory={
            "tracked": measured.tracked.peak,
            "at_peak": measured.tracked.at_peak,
            "allocated": measured.allocated,
            "reserved": measured.reserved,
            "device": measured.device,
        },
        losses=trained.losses,
        seconds=trained.seconds,
        rows=trained.rows,
        skipped=trained.skipped,
        accuracy=evaluate(trained.model, data["test"], recipe),
        train_rows=len(data["train"]),
        test_rows=len(data["test"]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=os.environ.get(COMMAND) or "a notebook",
    )
    if name and os.environ.get(RUNS):
        write(finished, Path(os.environ[RUNS]))
    if keep_model:
        return finished, trained
    del trained
    measure.release()
    return finished


def plan_of(recipe: Recipe, device: str) -> dict:
    """`Run.plan` of a recipe that runs on "cuda" or "cpu"."""
    planned = plan(recipe, device.partition(":")[0])
    values = {
        "target": planned.device,
        "peak": planned.peak,
        "at_peak": planned.at_peak,
        "flops": planned.flops,
    }
    if planned.device == "cuda":
        peaks = planned.allocator_peaks(gpus.here())
        values |= {"allocated": peaks.allocated, "reserved": peaks.reserved}
        values["seconds"] = seconds_on(planned, gpus.here().name)
    return values


def seconds_on(planned: Plan, device: str) -> float | None:
    """Seconds of a planned step on the GPU that the driver names so.

    None where it is not known, or has not the arithmetic of the step: frozen weights in bf16 or NF4
    are multiplied in bf16 under precision="fp32", which a T4 does by other means.
    """
    gpu = of_device(device)
    if gpu is None:
        return None
    try:
        return planned.seconds(gpu).total
    except ValueError:  # "has no bf16 arithmetic", of a product inside the step
        return None


def check_name(name: str) -> None:
    """Raises ValueError for a name that is no "<notebook>/<label>"."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} is no name for a run: use '<notebook>/<label>'.")


def write(run: Run, folder: Path) -> Path:
    """Write a run to a file of its own, whole or not at all.

    Raises ValueError for a run that has no name, or a number that is NaN or infinite.
    """
    check_name(run.name)
    file = f"{run.name.replace('/', '.')}.json"
    replace_all(folder, {file: run.to_json()})
    return folder / file


@cache
def measured_steps() -> list[tuple[str, Recipe, int, float]]:
    """(GPU, recipe, peak of allocated bytes, seconds) of the steps that GPUs have measured.

    They are those of results/steps, which `make record` writes (`benchmarks.measured_steps`).
    """
    found = []
    for path in sorted((RESULTS / "steps").glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf8"))
        name = kept["environment"]["name"]
        for one in kept["steps"] if kept["environment"]["device"] == "cuda" else ():
            recipe = Recipe.from_dict(one["recipe"])
            found.append((name, recipe, one["allocated"], one["seconds"]))
    return found


def read(notebook: str, folder: Path | None = None) -> dict[str, Run]:
    """{label: newest run} of a notebook's records, such as read("02_gradient_accumulation").

    Empty where none was taken.
    """
    paths = sorted((folder or RESULTS).glob(f"{notebook}.*.json"))
    runs = [Run.from_json(path.read_text(encoding="utf8")) for path in paths]
    runs.sort(key=lambda run: run.date)
    return {run.name.split("/", 1)[1]: run for run in runs}

"""A run with its provenance: trained, evaluated, measured and planned, to JSON and back."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

import torch

from helpers import gpus, memory
from helpers.plan import plan
from helpers.plan.out_of_memory import or_explain
from helpers.profile import environment
from helpers.recipe import Recipe
from helpers.train import TrainResult, encoded, evaluate, fit

RUNS = "TIGHT_FIT_RUNS"  # a folder: every named run is also written there
COMMAND = "TIGHT_FIT_COMMAND"  # what the reader typed, for the record
RESULTS = Path(__file__).parent.parent / "results"
VERSION = 1
WARM_UP = 3  # steps whose times are left out of the median


@dataclass(frozen=True)
class Run:
    """One fine-tune, as it is kept in a record.

    name         "<notebook>/<label>"
    recipe       every field; `weights` says whether the accuracy is that of pretrained weights
    environment  device, driver, versions, threads (`profile.environment`)
    plan         {"target", "peak" (bytes), "at_peak" {category: bytes}, "flops" {phase: count per
                 step}}; on a GPU also "allocated" and "reserved" (bytes, `Plan.allocator_peaks`)
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
    def accuracy_label(self) -> str:
        """How to call the accuracy, so that no reader takes it for a pretrained model's."""
        return "accuracy" if self.recipe.weights == "pretrained" else "accuracy (random weights)"

    def to_json(self) -> str:
        """The text of a record."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["recipe"] = self.recipe.to_dict()
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Run:
        """Raises ValueError, in one sentence, for text that is no complete run."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"This is not a run's record: its JSON breaks off or is malformed ({error})."
            ) from error
        if not isinstance(values, dict):
            raise ValueError("This is not a run's record: it holds no JSON object.")
        names = {item.name for item in fields(cls)}
        wrong = sorted(names ^ set(values))
        if wrong:
            raise ValueError(
                f"This is not a complete record of version {VERSION}: "
                f"wrong or missing {', '.join(wrong)}."
            )
        if values["version"] != VERSION:
            raise ValueError(
                f"This record has version {values['version']}; this code reads version {VERSION}."
            )
        run = cls(**(values | {"recipe": Recipe.from_dict(values["recipe"])}))
        run._check()
        return run

    def _check(self) -> None:
        steps = self.recipe.steps
        if not (len(self.losses) == len(self.seconds) == len(self.rows) == steps):
            raise ValueError(
                f"{self.name} has {len(self.losses)} losses for {steps} steps: "
                "half a run is no record."
            )
        if not 0 <= self.accuracy <= 1:
            raise ValueError(
                f"{self.name} has accuracy {self.accuracy}: it must lie between 0 and 1."
            )
        figures = [self.memory[name] for name in ("allocated", "reserved", "device")]
        if self.environment.get("device") == "cuda" and None in figures:
            raise ValueError(f"{self.name} ran on a GPU without its memory figures.")


def run(
    recipe: Recipe,
    name: str | None = None,
    device: str | None = None,
    checkpoint: str | Path | None = None,
    keep_model: bool = False,
) -> Run | tuple[Run, TrainResult]:
    """Fine-tune, evaluate, measure memory in a pass of its own, and plan: all about one recipe.

    name        "<notebook>/<label>"; with it, and TIGHT_FIT_RUNS set, the run is also written to
                that folder
    device      "cuda" or "cpu"; None takes the GPU if there is one
    checkpoint  as for `train.fit`
    keep_model  also return the TrainResult, which holds the model (and its memory)
    Raises what `train.fit` raises, and plan.out_of_memory.OutOfMemory, which says what would fit.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    data = encoded(recipe)
    measured = or_explain(recipe, lambda: memory.measure(recipe, data["train"], device))
    trained = or_explain(recipe, lambda: fit(recipe, data["train"], device, checkpoint))
    if len(trained.seconds) != recipe.steps:
        raise ValueError(
            "A resumed fine-tune has not timed its first steps: it is no record; start it anew."
        )
    finished = Run(
        name=name or "unnamed",
        recipe=recipe,
        environment=environment(device),
        plan=_planned(recipe, device),
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
    memory.release()
    return finished


def _planned(recipe: Recipe, device: str) -> dict:
    """`Run.plan` of a recipe."""
    planned = plan(recipe, torch.device(device).type)
    values = {
        "target": planned.target,
        "peak": planned.peak,
        "at_peak": planned.at_peak,
        "flops": planned.flops,
    }
    if planned.target == "cuda":
        peaks = planned.allocator_peaks(gpus.here())
        values |= {"allocated": peaks.allocated, "reserved": peaks.reserved}
    return values


def write(run: Run, folder: Path) -> Path:
    """Write a run to a file of its own, whole or not at all.

    Raises ValueError for a name that is no "<notebook>/<label>".
    """
    if not re.fullmatch(r"[\w-]+/[\w-]+", run.name):
        raise ValueError(f"{run.name!r} is no name for a run: use '<notebook>/<label>'.")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (run.name.replace("/", ".") + ".json")
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    unfinished.write_text(run.to_json(), encoding="utf8")
    os.replace(unfinished, path)
    return path


def read(notebook: str, folder: Path | None = None) -> dict[str, Run]:
    """{label: newest run} of a notebook's records, such as read("02_gradient_accumulation").

    Empty where none was taken. Raises ValueError for a file that is no complete run.
    """
    newest: dict[str, Run] = {}
    for path in sorted((folder or RESULTS).glob(f"{notebook}.*.json")):
        run = Run.from_json(path.read_text(encoding="utf8"))
        label = run.name.split("/", 1)[1]
        if label not in newest or run.date > newest[label].date:
            newest[label] = run
    return newest


def missing(notebook: str) -> str:
    """What a notebook says when it has no record."""
    return (
        "No record of this comparison has been taken yet. On a machine with a GPU, "
        f"`make record N={notebook[:2]}` takes one."
    )

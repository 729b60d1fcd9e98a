"""A run with its provenance: trained, evaluated, measured and planned, to JSON and back."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from helpers import measure, record_fields
from helpers.plan import or_explain, plan
from helpers.profile import environment
from helpers.recipe import Recipe
from helpers.train import TrainResult, encoded, evaluate, fit
from tight_fit import gpus
from tight_fit.checks import of_type, shown
from tight_fit.files import small_text
from tight_fit.gpus.specs import of_device
from tight_fit.memory.plan import Plan

RUNS = "TIGHT_FIT_RUNS"  # a folder: every named run is also written there
COMMAND = "TIGHT_FIT_COMMAND"  # what the reader typed, for the record
RESULTS = Path(__file__).parent.parent / "results"
SESSION = "session.json"  # beside runs: what `make record` has done so far; it is no run
VERSION = 1
LARGEST = 1 << 26  # bytes of a record
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
        """The text of a record. Raises ValueError or TypeError where a field makes no whole run."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        record_fields.check(values, self.recipe)
        values["recipe"] = self.recipe.to_dict()
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Run:
        """Raises ValueError, in one sentence, for text that is no complete run."""
        values = record_fields.parse(text, {item.name for item in fields(cls)}, VERSION)
        try:
            recipe = Recipe.from_dict(values["recipe"])
            record_fields.check(values, recipe)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return cls(**(values | {"recipe": recipe}))


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
    Raises ValueError for a name that is none, what `train.fit` raises, and
    plan.out_of_memory.OutOfMemory, which says what would fit.
    """
    of_type("recipe", recipe, Recipe)
    device = str(gpus.device(device))
    if name is not None:
        check_name(name)
    data = encoded(recipe)
    measured = or_explain(recipe, lambda: measure.measure(recipe, data["train"], device))
    trained = or_explain(recipe, lambda: fit(recipe, data["train"], device, checkpoint))
    if len(trained.seconds) != recipe.steps:
        raise ValueError(
            "A resumed fine-tune has not timed its first steps: it is no record; start it anew."
        )
    finished = Run(
        name=name or record_fields.UNNAMED,
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
    if not isinstance(name, str) or not record_fields.NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} is no name for a run: use '<notebook>/<label>'.")


def write(run: Run, folder: Path) -> Path:
    """Write a run to a file of its own, whole or not at all.

    Raises ValueError or TypeError for a run that is not whole or has no name.
    """
    check_name(run.name)
    text = run.to_json()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (run.name.replace("/", ".") + ".json")
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def read_file(path: Path) -> Run:
    """The run in a file `<notebook>.<label>[.<device>].json`.

    Raises ValueError, which names the file, for one that is no complete run, or another file's.
    """
    try:
        run = Run.from_json(small_text(path, LARGEST))
        if not path.name.startswith(f"{run.name.replace('/', '.')}."):
            raise ValueError(f"The file does not have the name of its run, {run.name!r}.")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is no record: it is not written in UTF-8.") from None
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path.name} is no record: {error}") from error
    return run


def _say(problem: str) -> None:
    print(problem, file=sys.stderr)


def read_all(
    folder: Path | None = None, pattern: str = "*.json", say: Callable[[str], object] = _say
) -> list[Run]:
    """The runs in a folder whose files match, by file name; a bad file costs one line.

    The state of `make record` (SESSION) is no bad file, and passed over.
    say  is called with the sentence about each file that is no record
    """
    found = []
    for path in sorted((folder or RESULTS).glob(pattern)):
        if path.name == SESSION:
            continue
        try:
            run = read_file(path)
            if "rehearsal" in run.environment:
                raise ValueError(f"{path.name} is of a rehearsal on a pretended GPU.")
            found.append(run)
        except ValueError as error:
            say(f"Left out: {error}")
    return found


@cache
def measured_steps(folder: Path | None = None) -> list[tuple[str, Recipe, int, float]]:
    """(GPU, recipe, peak of allocated bytes, seconds) of the steps that GPUs have measured.

    They are those of results/steps, which `make record` writes (`benchmarks.gpu_steps`).
    Raises ValueError for a file there that holds something else.
    """
    found = []
    for path in sorted((folder or RESULTS / "steps").glob("*.json")):
        try:
            kept = json.loads(small_text(path, LARGEST))
            if kept["environment"]["device"] == "cuda":
                name = kept["environment"]["name"]
                found += [
                    (name, Recipe.from_dict(one["recipe"]), one["allocated"], one["seconds"])
                    for one in kept["steps"]
                ]
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise ValueError(f"{path.name} is no file of measured steps: {error}") from error
    return found


def read(
    notebook: str, folder: Path | None = None, say: Callable[[str], object] = _say
) -> dict[str, Run]:
    """{label: newest run} of a notebook's records, such as read("02_gradient_accumulation").

    Empty where none was taken. `say` is that of `read_all`.
    """
    newest: dict[str, Run] = {}
    for run in read_all(folder, f"{notebook}.*.json", say):
        label = run.name.split("/", 1)[1]
        if label not in newest or run.date > newest[label].date:
            newest[label] = run
    return newest

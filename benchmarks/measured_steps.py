"""The plan against real steps of the models at full size, a technique at a time: `make proof`.

Each step runs in a process of its own, on the GPU or, where there is none, on the CPU: the real model with random weights (memory
does not depend on them), random tokens or pictures, one step to give the optimizer its states, then the one that is measured.
What is read, and from what instruments, says benchmarks/measure_step.py.

The results, with machine, versions, date and command, are kept in results/steps/. What torch-preflight and `accelerate
estimate-memory` say of the same steps stands beside them; the first is optional (pip install torch-preflight).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone, UTC
from pathlib import Path

import psutil

from benchmarks import other_estimators
from benchmarks.measure_step import measure
from helpers import gpus, models, record
from helpers.plan.hf_plan import ModelStep
from helpers.plan.planner import plan
from helpers.profile import environment, usable_cuda
from helpers.recipe import Recipe, difference, replace
from helpers.strategy import ladder
from helpers.strategy.techniques import MODELS, TECHNIQUES
from helpers.tables import Table
from helpers.units import size

FOLDER = record.RESULTS / "steps"
MORE = {
    "half of the rows": {"batch_size": 8},
    "SGD with momentum": {"optimizer": "sgd"},
    "Adafactor": {"optimizer": "adafactor"},
    "Lion": {"optimizer": "lion"},
    "8-bit Lion": {"optimizer": "lion8bit"},
    "accumulation, bf16, checkpointing and 8-bit AdamW together": {
        "accumulation": 4,
        "precision": "bf16",
        "checkpointing": True,
        "optimizer": "adamw8bit_embed32",
    },
}
LARGE = "DeBERTa-v3-large, 16 × 512 tokens"  # the ladder of notebook 19
ROOM = 0.8  # share of the machine's memory that a step's plan may take to be tried
LIMIT = 3600.0  # seconds a step may take
MMAP = {
    "MALLOC_MMAP_THRESHOLD_": str(2**16),
    "MALLOC_TRIM_THRESHOLD_": "0",
}  # glibc gives freed blocks back: mallopt(3)


@dataclass(frozen=True)
class Step:
    """One measured step. Bytes; None where there is no such figure.

    model, technique   as in the table
    planned            peak of the tensors by plan
    allocated          measured by PyTorch's allocator
    reserved, planned_allocated, planned_reserved   on a GPU: what the caching allocator held, and the plan of it and of `allocated`
    resident           on a CPU under Linux: what the process gained
    preflight, accelerate   what the two estimators say
    """

    model: str
    technique: str
    recipe: Recipe
    planned: int
    allocated: int
    reserved: int | None = None
    planned_allocated: int | None = None
    planned_reserved: int | None = None
    resident: int | None = None
    preflight: int | None = None
    accelerate: int | None = None

    @property
    def miss(self) -> float:
        """(planned - measured) / measured, of the allocated peak."""
        return (self.planned_allocated or self.planned) / self.allocated - 1

    @property
    def inside_bitsandbytes(self) -> bool:
        """Whether, on a CPU, its kernel for 32-bit states takes memory that no plan sees (benchmarks/measure_step.py)."""
        return self.reserved is None and self.recipe.optimizer == "adamw8bit_embed32"

    def to_dict(self) -> dict:
        return vars(self) | {
            "recipe": {name: new for name, (_, new) in difference(Recipe(), self.recipe).items()}
        }

    @classmethod
    def from_dict(cls, values: dict) -> Step:
        return cls(**values | {"recipe": Recipe.from_dict(values["recipe"])})


@dataclass(frozen=True)
class Proof:
    """The steps of one machine, with its description (`profile.environment`), the date (UTC) and the command."""

    environment: dict
    date: str
    command: str
    steps: list[Step]

    def to_json(self) -> str:
        return (
            json.dumps(
                vars(self) | {"steps": [step.to_dict() for step in self.steps]},
                indent=1,
                allow_nan=False,
            )
            + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> Proof:
        """Raises ValueError, in one sentence, for text that is no proof."""
        try:
            values = json.loads(text)
            return cls(**values | {"steps": [Step.from_dict(step) for step in values["steps"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"This is no file of measured steps ({error}): make it again with `make proof`."
            ) from error


Case = tuple[str, str, Recipe]  # model, technique, recipe


def cases() -> list[Case]:
    """Every step: each technique by itself for DeBERTa-base and ViT, then the ladder's rungs."""
    found = [
        (model, name, replace(recipe, **change))
        for name, change in (TECHNIQUES | MORE).items()
        for model, recipe in MODELS.items()
    ]
    shapes = set()
    for name, recipe in ladder.climb(ladder.START).items():
        recipe = replace(
            recipe, padding="fixed"
        )  # a plan is of the longest row: padding changes nothing
        if recipe not in shapes:
            shapes.add(recipe)
            found.append((LARGE, f"up to {name}", recipe))
    return [(model, name, replace(recipe, weights="random")) for model, name, recipe in found]


def told(recipe: Recipe, device: str, frozen: float) -> tuple[int | None, int | None]:
    """(torch-preflight's, accelerate's) bytes for a step, None where the first is not installed. Each is told all that it takes:
    torch-preflight the optimizer and the share of the parameters that is `frozen`, accelerate the precision alone."""
    step = ModelStep(
        models.config(recipe),
        batch_size=recipe.batch_size,
        length=recipe.tokens,
        precision=recipe.precision,
        optimizer=recipe.optimizer,
        checkpointing=recipe.checkpointing,
        accumulation=recipe.accumulation,
    )
    return other_estimators.preflight(step, device, frozen), other_estimators.estimate_memory(step)


def alone(recipe: Recipe, device: str) -> dict[str, int | None]:
    """`measure` in a process of its own. Raises RuntimeError with its last words where it failed."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.measured_steps",
            "--one",
            json.dumps(recipe.to_dict()),
            "--device",
            device,
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=record.RESULTS.parent,
        env=os.environ | MMAP,
    )
    if done.returncode:
        raise RuntimeError(
            f"A step could not be measured: {(done.stderr.strip().splitlines() or ['it was killed'])[-1]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


class Room:
    """Bytes that steps side by side share: each waits until what it plans to take is free."""

    def __init__(self, size: int):
        self.size, self.free, self.changed = size, size, threading.Condition()

    @contextmanager
    def taken(self, need: int):
        with self.changed:
            self.changed.wait_for(lambda: self.free >= need)
            self.free -= need
        try:
            yield
        finally:
            with self.changed:
                self.free += need
                self.changed.notify_all()


def prove(
    device: str, jobs: int = 1, chosen: list[Case] | None = None, failed: list[str] | None = None
) -> Iterator[Step]:
    """Measure every step that the machine has room for, `jobs` at a time, and give each as it is done. One that fails is named,
    added to `failed`, and does not stop the others, because they may take hours."""
    gpu = gpus.here()
    room = Room(int(ROOM * (gpu.memory if device == "cuda" else psutil.virtual_memory().available)))
    planned = []
    for case in cases() if chosen is None else chosen:
        made = plan(case[-1], device)
        if made.peak <= room.size:
            planned.append(
                (case, made.peak, made.allocator_peaks(gpu) if device == "cuda" else None)
            )
        else:
            print(
                f"{case[0]}, {case[1]}: left out, {size(made.peak)} by plan is more than there is room for here",
                flush=True,
            )

    def one(todo) -> dict[str, int | None] | None:
        (model, technique, recipe), peak, _ = todo
        try:
            with room.taken(peak):
                return alone(recipe, device)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{model}, {technique}: FAILED. {error}", file=sys.stderr, flush=True)
            if failed is not None:
                failed.append(f"{model}, {technique}")
            return None

    with ThreadPoolExecutor(jobs) as pool:
        for ((model, technique, recipe), peak, blocks), seen in zip(
            planned, pool.map(one, planned)
        ):
            if seen is None:
                continue
            preflight, accelerate = told(recipe, device, 1 - seen["trained"] / seen["parameters"])
            step = Step(
                model,
                technique,
                recipe,
                peak,
                seen["allocated"],
                seen["reserved"],
                blocks and blocks.allocated,
                blocks and blocks.reserved,
                seen["resident"],
                preflight,
                accelerate,
            )
            print(
                f"{model}, {technique}: {step.allocated:,} bytes, off by {_off(step)}", flush=True
            )
            yield step


def write(proof: Proof, folder: Path, finished: bool = True) -> Path:
    """One file a machine, whole or not at all. What is not `finished` goes into a file of its own beside what was kept earlier."""
    from helpers.files import replace_all

    name = proof.environment["name"] if proof.environment["device"] == "cuda" else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path, unfinished = folder / f"{slug}.json", folder / f"{slug}.unfinished"
    if not finished:
        replace_all(folder, {unfinished.name: proof.to_json()})
        return unfinished
    replace_all(folder, {path.name: proof.to_json()}, [unfinished] if unfinished.exists() else [])
    return path


def read(folder: Path | None = None) -> list[Proof]:
    """What was kept, a proof a machine. Raises ValueError for a file that is none."""
    return [
        Proof.from_json(path.read_text(encoding="utf8"))
        for path in sorted((folder or FOLDER).glob("*.json"))
    ]


def table(proof: Proof) -> Table:
    """A row a step: planned and measured peaks, and what the others say."""
    rows = []
    for step in proof.steps:
        row = {
            "model": step.model,
            "technique": step.technique,
            "planned": size(step.planned_allocated or step.planned),
            "allocated": size(step.allocated),
            "off": _off(step),
        }
        if step.reserved is not None:
            row |= {
                "reserved, planned": size(step.planned_reserved),
                "reserved": size(step.reserved),
            }
        if step.resident is not None:
            row["resident"] = f"{size(step.resident)} ({step.resident / step.allocated - 1:+.1%})"
        for name, found in (
            ("torch-preflight", step.preflight),
            ("accelerate estimate-memory", step.accelerate),
        ):
            row[name] = "-" if found is None else f"{found / step.allocated - 1:+.0%}"
        rows.append(row)
    return Table(rows)


def _off(step: Step) -> str:
    """Bytes where they are few, else a share."""
    off = (step.planned_allocated or step.planned) - step.allocated
    return f"{off:+,} bytes" if abs(off) < 2**20 else f"{step.miss:+.2%}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured_steps",
        description="Plans against real steps at full size.",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="steps side by side, as far as memory goes (1)"
    )
    parser.add_argument(
        "--out", type=Path, default=FOLDER, help="another folder than results/steps"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="the GPU where there is one that works"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="steps whose model or technique has this text; nothing is kept",
    )
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.jobs < 1:
        parser.error(f"--jobs {asked.jobs}: at least one step at a time")
    works, why = usable_cuda()
    if asked.device == "cuda" and not works:
        print(
            f"Steps cannot be measured on a GPU here ({why}): leave --device out to measure them on the CPU.",
            file=sys.stderr,
        )
        return 1
    device = asked.device or ("cuda" if works else "cpu")
    if asked.one:
        print(json.dumps(measure(Recipe.from_dict(json.loads(asked.one)), device)))
        return 0
    chosen = [case for case in cases() if asked.only.lower() in f"{case[0]}, {case[1]}".lower()]
    typed = "python -m benchmarks.measured_steps " + shlex.join(
        sys.argv[1:] if arguments is None else arguments
    )
    done = Proof(
        environment(device),
        datetime.now(UTC).isoformat(timespec="seconds"),
        typed.strip(),
        [],
    )
    failed: list[str] = []
    for step in prove(device, asked.jobs, chosen, failed):
        done.steps.append(step)
        if not asked.only:
            write(
                done, asked.out, finished=False
            )  # a run of hours that is cut off keeps what it has measured
    if not done.steps:
        print("No step was measured: nothing is kept.", file=sys.stderr)
        return 1
    if not asked.only:
        print(f"Kept: {write(done, asked.out)}")
    print(table(done))
    if failed:
        print(
            f"{len(failed)} of {len(done.steps) + len(failed)} steps failed and are missing: {'; '.join(failed)}.",
            file=sys.stderr,
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""The plan against real steps of the models at full size, one technique at a time: `make proof`.

Each step runs in a process of its own, on the GPU or, where there is none, on the CPU: the real
model with random weights (memory does not depend on them), random tokens or images, one step that
gives the optimizer its states, then the step that is measured. `benchmarks.measure_step` says by
which instruments.

The results, with machine, versions, date and command, are kept in results/steps/. The table shows
beside them what torch-preflight and `accelerate estimate-memory` say of the same steps; the first
is optional (pip install torch-preflight).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime

import psutil

from benchmarks import apart
from benchmarks.measure_step import measure
from benchmarks.proof import FOLDER, Proof, Step, table, write
from benchmarks.room import MEMORY_FRACTION, has_room
from benchmarks.techniques import MODELS, TECHNIQUES
from helpers import ladder, models
from helpers.plan import plan
from helpers.profile import environment, usable_cuda
from helpers.recipe import Recipe, replace
from tight_fit import gpus
from tight_fit.command.arguments import new_folder, whole_number
from tight_fit.command.wrapper import run as run_command
from tight_fit.memory.plan import Plan
from tight_fit.plans.model import ModelStep
from tight_fit.units import size

# Beside the techniques of `helpers.ladder`: {name: fields of the recipe that change}.
MORE: dict[str, dict] = {
    "half of the batch": {"batch_size": 8},
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
TIME_LIMIT = 3600.0  # seconds that one step may take
# glibc shall give freed blocks back, so that resident memory is what the step needs: mallopt(3).
GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": "0"}


Case = tuple[str, str, Recipe]  # model, technique, recipe


def cases(half: str = "bf16") -> list[Case]:
    """Every step: each technique by itself for DeBERTa-base and ViT, then the ladder's rungs.

    half  the 16-bit precision of the GPU: with "fp16" the ladder is climbed in it, and the
          techniques in bf16, which such a GPU only emulates, are left out
    """
    steps = [
        (model, name, replace(recipe, **change))
        for name, change in (TECHNIQUES | MORE).items()
        for model, recipe in MODELS.items()
        if change.get("precision") in (None, "fp16", half)
    ]
    rungs: dict[Recipe, str] = {}
    for name, recipe in ladder.climb(ladder.START, ladder.rungs(ladder.START, half)).items():
        # A plan is of the longest example, so padding changes nothing: such rungs are left out.
        rungs.setdefault(replace(recipe, padding="fixed"), name)
    steps += [(LARGE, f"up to {name}", recipe) for recipe, name in rungs.items()]
    return [(model, name, replace(recipe, weights="random")) for model, name, recipe in steps]


def other_estimates(recipe: Recipe, device: str, frozen: float) -> tuple[int | None, int | None]:
    """(bytes by torch-preflight, bytes by accelerate) for a step; None where it is not installed.

    frozen  the fraction of the parameters that does not train
    Each is given all that it takes: torch-preflight the optimizer and the frozen fraction,
    accelerate the precision alone.
    """
    from benchmarks import other_estimators

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


def measure_apart(recipe: Recipe, device: str) -> dict[str, int | None]:
    """`measure` in a process of its own. Raises RuntimeError with the reason where it failed."""
    command = [sys.executable, "-m", "benchmarks.measured_steps", "--device", device]
    command += ["--one", json.dumps(recipe.to_dict())]
    return apart.run(command, float("inf"), TIME_LIMIT, threading.Event(), GLIBC)


class MemoryBudget:
    """Bytes that steps side by side share: each waits until what it plans to take is free."""

    def __init__(self, size: int):
        self.size, self.free, self.changed = size, size, threading.Condition()

    @contextmanager
    def taken(self, need: int) -> Iterator[None]:
        """Hold `need` bytes, from when they are free to the end of the context."""
        with self.changed:
            self.changed.wait_for(lambda: self.free >= need)
            self.free -= need
        try:
            yield
        finally:
            with self.changed:
                self.free += need
                self.changed.notify_all()


def measure_steps(
    device: str, jobs: int = 1, chosen: list[Case] | None = None, failed: list[str] | None = None
) -> Iterator[Step]:
    """Measure every step that the machine has memory for, and give each when it is done.

    jobs    how many run side by side
    chosen  the steps; None takes all `cases`
    failed  gets the names of steps that fail. They do not stop the others, which may take hours.
    """
    gpu = gpus.here()
    memory = gpu.memory if device == "cuda" else psutil.virtual_memory().available
    budget = MemoryBudget(int(MEMORY_FRACTION * memory))
    planned: list[tuple[Case, Plan]] = []
    for case in cases() if chosen is None else chosen:
        model, technique, recipe = case
        plan_of_step = plan(recipe, device)
        if has_room(plan_of_step, memory):
            planned.append((case, plan_of_step))
        else:
            print(
                f"{model}, {technique}: left out, {size(plan_of_step.peak)} by plan is more than "
                "there is room for here",
                flush=True,
            )

    def measured(entry: tuple[Case, Plan]) -> dict[str, int | None] | None:
        (model, technique, recipe), plan_of_step = entry
        try:
            with budget.taken(plan_of_step.peak):
                return measure_apart(recipe, device)
        except RuntimeError as error:
            print(f"{model}, {technique}: FAILED. {error}", file=sys.stderr, flush=True)
            if failed is not None:
                failed.append(f"{model}, {technique}")
            return None

    with ThreadPoolExecutor(jobs) as pool:
        for (case, plan_of_step), seen in zip(planned, pool.map(measured, planned)):
            if seen is not None:
                step = _step(case, plan_of_step, seen, device)
                print(
                    f"{step.model}, {step.technique}: {step.allocated:,} bytes, off by {step.off}",
                    flush=True,
                )
                yield step


def _step(case: Case, planned: Plan, seen: dict, device: str) -> Step:
    """What was measured of a step, beside its plan and the other estimates."""
    peaks = planned.allocator_peaks(gpus.here()) if device == "cuda" else None
    frozen = 1 - seen["trained"] / seen["parameters"]
    preflight, accelerate = other_estimates(case[-1], device, frozen)
    return Step(
        *case,
        planned=planned.peak,
        allocated=seen["allocated"],
        reserved=seen["reserved"],
        planned_allocated=peaks.allocated if peaks else None,
        planned_reserved=peaks.reserved if peaks else None,
        resident=seen["resident"],
        preflight=preflight,
        accelerate=accelerate,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured_steps",
        description="Plans against real steps at full size.",
    )
    parser.add_argument(
        "--jobs",
        type=whole_number(1, 1024),
        default=1,
        help="steps side by side, if memory allows (1)",
    )
    parser.add_argument(
        "--out", type=new_folder, default=FOLDER, help="a folder other than results/steps"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="by default the GPU where there is one that works"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only steps whose model or technique contains this text; nothing is kept",
    )
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a step failed or none was measured."""
    asked = _parser().parse_args(arguments)
    works, why = usable_cuda()
    if asked.device == "cuda" and not works:
        print(
            f"Steps cannot be measured on a GPU here ({why}): leave --device out to measure them "
            "on the CPU.",
            file=sys.stderr,
        )
        return 1
    device = asked.device or ("cuda" if works else "cpu")
    if asked.one:
        print(json.dumps(measure(Recipe.from_dict(json.loads(asked.one)), device)))
        return 0
    typed = shlex.join(sys.argv[1:] if arguments is None else arguments)
    proof = Proof(
        environment(device),
        datetime.now(UTC).isoformat(timespec="seconds"),
        f"python -m benchmarks.measured_steps {typed}".strip(),
        [],
    )
    steps = cases("fp16") if device == "cuda" and not gpus.here().bf16 else cases()
    chosen = [case for case in steps if asked.only.lower() in f"{case[0]}, {case[1]}".lower()]
    failed: list[str] = []
    for step in measure_steps(device, asked.jobs, chosen, failed):
        proof.steps.append(step)
        if not asked.only:  # a run of hours that is cut off keeps what it has measured
            write(proof, asked.out, finished=False)
    if not proof.steps:
        print("No step was measured: nothing is kept.", file=sys.stderr)
        return 1
    if not asked.only:
        print(f"Kept: {write(proof, asked.out)}")
    print(table(proof))
    if failed:
        print(
            f"{len(failed)} of {len(proof.steps) + len(failed)} steps failed and are missing: "
            f"{'; '.join(failed)}.",
            file=sys.stderr,
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(run_command(main, "python -m benchmarks.measured_steps"))

"""Every technique's step on a GPU, planned and measured, within a given time: bytes and seconds.

Each step is planned, built and measured in a process of its own. Several such processes run side by
side, but only one at a time uses the GPU (`measure_step.alone_on_the_gpu`), so that its seconds are
true. Each result is written as soon as it is there, and a later call goes on with what is missing.

A step may fail, or work for longer than its limit: this is kept as well, and the step is tried
again only after everything else had its turn. Two GPUs that wait for each other once will do so in
every layout, so after one such step the other layouts have to wait too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import apart, gpu_layouts
from benchmarks.measure_step import measure
from benchmarks.measured_steps import LARGE, Case, cases, other_estimates
from benchmarks.proof import Proof, Step, read_one, refuse_rehearsal, write
from benchmarks.room import has_room
from helpers.plan import plan
from helpers.profile import environment
from helpers.recipe import Recipe, difference
from helpers.record import seconds_on
from tight_fit import gpus
from tight_fit.command.wrapper import run
from tight_fit.optimizer_kinds import KINDS
from tight_fit.packages import missing as not_installed

SECONDS = 40.0  # that must be left for another step to begin
LIMIT = 300.0  # seconds of work of a step on one GPU; that of two GPUs is gpu_layouts.TIME_LIMIT
TOO_LARGE = {"too_large": True}  # the answer of a step that is left out for good
JOBS = 4  # processes side by side; more than half of the cores would disturb the one that measures
# Optimizers that need no other package; those that are not named here are bitsandbytes'.
NO_BF16 = (
    "This GPU has no bf16 arithmetic, which PyTorch would only emulate: the steps in bf16 are left "
    "out, and the ladder is climbed in fp16."
)


@dataclass
class Outcome:
    """What a call of `measure_all` did.

    file     where the steps are kept, None where there is none yet
    proof    every step of this machine so far: measured, too large or failed, in earlier calls too
    left     names of steps for which no time was left
    put_off  steps that were not tried, or not to their end, because everything else comes first
    note     which steps this GPU does without, and why; "" where there are none
    """

    file: Path | None
    proof: Proof
    left: list[str] = field(default_factory=list)
    put_off: list[Case] = field(default_factory=list)
    note: str = ""


def name_of(case: Case | Step) -> str:
    """How a step is called in what is printed."""
    model, technique = case[:2] if isinstance(case, tuple) else (case.model, case.technique)
    return f"{model}, {technique}"


def every_case(count: int, bf16: bool = True) -> list[Case]:
    """The steps of a machine with so many GPUs: those of two GPUs come before the large model's.

    bf16  whether its GPUs have this arithmetic
    """
    alone = cases() if bf16 else cases("fp16")
    found = alone + (gpu_layouts.cases() if count >= 2 else [])
    return sorted(found, key=lambda case: case[0] == LARGE)


def packages(recipe: Recipe) -> list[str]:
    """Packages that a step imports beside PyTorch and transformers."""
    library = bool(KINDS[recipe.optimizer].package) or recipe.base == "nf4"
    return ["bitsandbytes"] * library + ["peft"] * (recipe.lora_rank is not None)


def on_two(case: Case) -> bool:
    """Whether it is a step on two GPUs."""
    return case[1] in gpu_layouts.LAYOUTS


def one(case: Case) -> Step | None:
    """Plan and measure a step on the GPU, in a fresh process; None where its memory is too small.

    Raises what `measure` raises, and `gpu_layouts.one` for a step on two GPUs.
    """
    if on_two(case):
        return gpu_layouts.one(case)
    recipe, gpu = case[-1], gpus.here()
    planned = plan(recipe, "cuda")
    if not has_room(planned, gpu.memory):
        return None
    seen = measure(recipe, "cuda")
    peaks = planned.allocator_peaks(gpu)
    preflight, accelerate = _others(recipe, seen)
    return Step(
        *case,
        planned=planned.peak,
        allocated=seen["allocated"],
        reserved=seen["reserved"],
        planned_allocated=peaks.allocated,
        planned_reserved=peaks.reserved,
        preflight=preflight,
        accelerate=accelerate,
        seconds=seen["seconds"],
        planned_seconds=seconds_on(planned, gpu.name),
    )


def _others(recipe: Recipe, seen: dict) -> tuple[int | None, int | None]:
    """What other estimators say; none of them may cost a step that a GPU has measured."""
    try:
        return other_estimates(recipe, "cuda", 1 - seen["trained"] / seen["parameters"])
    except Exception as error:  # they are other people's programs
        print(f"The other estimators failed: {error}", file=sys.stderr)
        return None, None


def measure_all(
    folder: Path,
    command: str,
    until: float = float("inf"),
    only: list[Case] | None = None,
    jobs: int | None = None,
) -> Outcome:
    """Measure what is missing in `folder`, and write each step to it as soon as it is measured.

    command  is kept in the record
    until    the moment (time.monotonic) after which no step goes on
    only     what an earlier call with the folder put off; None takes all that is missing, and puts
             off the steps that failed before, and after a failure on two GPUs all others on two
    jobs     as JOBS, fewer on few cores
    Raises ValueError for a rehearsal where the folder is that of the records, and for a file of
    this GPU there that cannot be read.
    """
    bf16 = gpus.here().bf16
    everything = every_case(torch.cuda.device_count(), bf16)
    here = environment("cuda")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = Outcome(None, read_one(folder, here) or Proof(here, now, command, []))
    proof = outcome.proof
    refuse_rehearsal(proof, folder)
    done = {name_of(step) for step in proof.steps} | set(proof.large)
    missing = [case for case in everything if name_of(case) not in done]
    missing, waiting = _possible(missing)
    outcome.note = " ".join(filter(None, ("" if bf16 else NO_BF16, waiting)))
    if only is None:
        outcome.put_off = _later(missing, proof)
        missing = [case for case in missing if case not in outcome.put_off]
    else:
        wanted = [name_of(case) for case in only]
        missing = [case for case in missing if name_of(case) in wanted]
        missing.sort(key=lambda case: name_of(case) in proof.failed)
    jobs = jobs or max(1, min(JOBS, (os.cpu_count() or 1) // 2))
    hung = threading.Event()

    def work(case: Case) -> Step | None:
        try:
            return _apart(case, until, hung if on_two(case) else threading.Event(), jobs)
        except apart.Hung:
            if on_two(case):
                hung.set()
            raise

    def keep(case: Case, step: Step | None) -> str:
        if step is None:
            proof.large.append(name_of(case))
            return "too large for this GPU"
        proof.steps.append(step)
        return _told(step)

    def save() -> None:
        outcome.file = write(proof, folder, finished=False)

    for case, error in apart.side_by_side(missing, jobs, work, name_of, proof.failed, keep, save):
        if isinstance(error, apart.PutOff):
            outcome.put_off.append(case)
        elif name_of(case) not in proof.failed:
            outcome.left.append(name_of(case))
    order = {name_of(case): number for number, case in enumerate(everything)}
    proof.steps.sort(key=lambda step: order.get(name_of(step), len(order)))
    if proof.steps:
        known = {name_of(step) for step in proof.steps} | set(proof.large)
        outcome.file = write(proof, folder, finished=known >= set(order))
    return outcome


def _possible(missing: list[Case]) -> tuple[list[Case], str]:
    """The steps whose packages are installed, and what the others wait for, in a sentence or ""."""
    absent = {name_of(case): not_installed(*packages(case[-1])) for case in missing}
    names = sorted(set().union(*absent.values()))
    count = sum(map(bool, absent.values()))
    told = f"{count} steps wait for {' and '.join(names)} to be installed." if count else ""
    return [case for case in missing if not absent[name_of(case)]], told


def _later(missing: list[Case], proof: Proof) -> list[Case]:
    """The steps that have to wait, as a failure of before may take the time of all the others."""
    two_failed = any(on_two(case) and name_of(case) in proof.failed for case in missing)
    return [
        case for case in missing if name_of(case) in proof.failed or (two_failed and on_two(case))
    ]


def _told(step: Step) -> str:
    planned = "" if step.planned_seconds is None else f", planned {step.planned_seconds:.3f}"
    return f"{step.off}; {step.seconds:.3f} s{planned}"


def _apart(case: Case, until: float, put_off: threading.Event, jobs: int) -> Step | None:
    """`one` in a process of its own, one of `jobs`. Raises as `apart.run`."""
    if put_off.is_set():
        raise apart.PutOff
    if until - time.monotonic() < SECONDS:
        raise TimeoutError
    model, technique, recipe = case
    changes = {name: new for name, (_, new) in difference(Recipe(), recipe).items()}
    asked = json.dumps({"model": model, "technique": technique, "recipe": changes})
    command = [sys.executable, "-m", "benchmarks.gpu_steps", asked]
    limit = gpu_layouts.TIME_LIMIT if on_two(case) else LIMIT
    answer = apart.run(command, until, limit, put_off, apart.threads(jobs))
    if answer == TOO_LARGE:
        return None
    try:
        return Step.from_dict(answer)
    except (TypeError, KeyError, ValueError) as error:
        raise RuntimeError(f"Its answer is no measured step ({error}).") from error


def main(arguments: list[str] | None = None) -> int:
    """Measure the one step that a JSON object names, and print it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=__doc__)
    parser.add_argument("step", help="a JSON object with model, technique and recipe")
    values = json.loads(parser.parse_args(arguments).step)
    step = one((values["model"], values["technique"], Recipe.from_dict(values["recipe"])))
    print(json.dumps(TOO_LARGE if step is None else step.to_dict()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m benchmarks.gpu_steps"))

"""Every technique's step on a GPU, planned and measured, within a given time: bytes and seconds.

Each step is planned, built and measured in a process of its own. Several such processes run side by
side, but only one at a time uses the GPU (`measure_step.alone_on_the_gpu`), so that its seconds are
true. Each result is written as soon as it is there, and a later call goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import gpu_layouts
from benchmarks.measure_step import measure
from benchmarks.measured_steps import LARGE, MEMORY_FRACTION, Case, cases, other_estimates
from benchmarks.proof import Proof, Step, read_one, refuse_rehearsal, write
from helpers import gpus, record
from helpers.commands.wrapper import run
from helpers.plan.for_record import seconds_on
from helpers.plan.planner import plan
from helpers.profile import environment
from helpers.recipe import Recipe, difference

SECONDS = 40.0  # that must be left for another step to begin
TOO_LARGE = "too large"  # why a step is left out for good
JOBS = 4  # processes side by side; more than half of the cores would disturb the one that measures


@dataclass
class Outcome:
    """What a call of `measure_all` did.

    file    where the steps are kept, None where there is none yet
    proof   every step measured so far, of earlier calls as well
    large   names of steps that this GPU has no memory for
    failed  {name of a step: why}
    left    names of steps for which no time was left
    """

    file: Path | None
    proof: Proof
    large: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def name_of(case: Case | Step) -> str:
    """How a step is called in what is printed."""
    model, technique = case[:2] if isinstance(case, tuple) else (case.model, case.technique)
    return f"{model}, {technique}"


def every_case(count: int) -> list[Case]:
    """The steps of a machine with so many GPUs: those of two GPUs come before the large model's."""
    found = cases() + (gpu_layouts.cases() if count >= 2 else [])
    return sorted(found, key=lambda case: case[0] == LARGE)


def one(case: Case) -> Step | None:
    """Plan and measure a step on the GPU, in a fresh process; None where its memory is too small.

    Raises what `measure` raises, and `gpu_layouts.one` for a step on two GPUs.
    """
    if case[1] in gpu_layouts.LAYOUTS:
        return gpu_layouts.one(case)
    recipe, gpu = case[-1], gpus.here()
    planned = plan(recipe, "cuda")
    if planned.peak > MEMORY_FRACTION * gpu.memory:
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
    chosen: list[Case] | None = None,
    jobs: int | None = None,
) -> Outcome:
    """Measure what is missing in `folder`, and write each step to it as soon as it is measured.

    command  is kept in the record
    until    the moment (time.monotonic) after which no step goes on
    chosen   the steps, None for `every_case`; jobs as JOBS, fewer on few cores
    Raises ValueError for a rehearsal where the folder is that of the records.
    """
    everything = every_case(torch.cuda.device_count()) if chosen is None else chosen
    machine = environment("cuda")
    kept = read_one(folder, machine)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    outcome = Outcome(None, kept or Proof(machine, now, command, []))
    refuse_rehearsal(outcome.proof, folder)
    there = {(step.model, step.technique) for step in outcome.proof.steps}
    missing = [case for case in everything if case[:2] not in there]
    lock = threading.Lock()

    def work(case: Case) -> None:
        try:
            step = _apart(case, until)
        except TimeoutError:
            outcome.left.append(name_of(case))
            return
        except RuntimeError as error:
            outcome.failed[name_of(case)] = str(error)
            print(f"    {name_of(case)}: FAILED. {error}", flush=True)
            return
        if step is None:
            outcome.large.append(name_of(case))
            return
        with lock:
            outcome.proof.steps.append(step)
            outcome.file = write(outcome.proof, folder, finished=False)
        told = "" if step.planned_seconds is None else f", planned {step.planned_seconds:.3f}"
        print(f"    {name_of(step)}: {step.off}; {step.seconds:.3f} s{told}", flush=True)

    with ThreadPoolExecutor(jobs or max(1, min(JOBS, (os.cpu_count() or 1) // 2))) as pool:
        list(pool.map(work, missing))
    order = {case[:2]: number for number, case in enumerate(everything)}
    outcome.proof.steps.sort(key=lambda step: order.get((step.model, step.technique), len(order)))
    if outcome.proof.steps:
        done = not outcome.left and not outcome.failed and chosen is None
        outcome.file = write(outcome.proof, folder, finished=done)
    return outcome


def _apart(case: Case, until: float) -> Step | None:
    """`one` in a process of its own. Raises TimeoutError and RuntimeError."""
    left = until - time.monotonic()
    if left < SECONDS:
        raise TimeoutError
    model, technique, recipe = case
    changes = {name: new for name, (_, new) in difference(Recipe(), recipe).items()}
    asked = json.dumps({"model": model, "technique": technique, "recipe": changes})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_steps", asked],
            capture_output=True,
            text=True,
            timeout=None if left == float("inf") else left,
            cwd=record.RESULTS.parent,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it was killed"])[-1][:300])
    answer = json.loads(done.stdout.splitlines()[-1])
    return None if answer == TOO_LARGE else Step.from_dict(answer)


def main(arguments: list[str] | None = None) -> int:
    """Measure the one step that a JSON object names, and print it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=__doc__)
    parser.add_argument("step", help="a JSON object with model, technique and recipe")
    values = json.loads(parser.parse_args(arguments).step)
    step = one((values["model"], values["technique"], Recipe.from_dict(values["recipe"])))
    print(json.dumps(TOO_LARGE if step is None else step.to_dict()))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m benchmarks.gpu_steps"))

"""The plan against real steps of the models at full size, one technique at a time.

`make proof` measures on this machine's GPU or, where there is none, on its CPU (hours); `make
record` measures on a GPU within a given time. Each step is the real model with random weights
(memory does not depend on them) on random tokens or images, planned, built and measured in a
process of its own; `benchmarks.measure_step` says by which instruments. Several such processes may
run side by side, but only one at a time uses the GPU, so that its seconds are true.

Each result is written as soon as it is there, with machine, versions, date and command, and a later
call goes on with what is missing. A step may fail, or work for longer than its limit: this is kept
as well, and the step is tried again only after everything else had its turn. Two GPUs that wait for
each other once will do so in every layout, so after one such step the other layouts wait too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from benchmarks import apart, gpu_layouts
from benchmarks.measure_step import measure
from benchmarks.proof import FOLDER, Proof, Step, read_one, refuse_rehearsal, table, write
from benchmarks.room import has_room
from benchmarks.techniques import MODELS, TECHNIQUES
from helpers import ladder
from helpers.plan import plan
from helpers.profile import environment, usable_cuda
from helpers.recipe import Recipe, replace
from helpers.record import seconds_on
from tight_fit import gpus
from tight_fit.command.arguments import new_folder, whole_number
from tight_fit.command.wrapper import run
from tight_fit.optimizer_kinds import KINDS
from tight_fit.packages import missing as not_installed

NAME = "python -m benchmarks.measured_steps"
# Beside the techniques of `benchmarks.techniques`: {name: fields of the recipe that change}.
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
SECONDS = 40.0  # that must be left for another step to begin
# Seconds that one step may work; of two GPUs it is gpu_layouts.TIME_LIMIT.
LIMITS = {"cuda": 300.0, "cpu": 3600.0}
TOO_LARGE = {"too_large": True}  # the answer of a step that is left out for good
JOBS = 4  # processes side by side; more than half of the cores would disturb the one that measures
NO_BF16 = (
    "This GPU has no bf16 arithmetic, which PyTorch would only emulate: the steps in bf16 are left "
    "out, and the ladder is climbed in fp16."
)

Case = tuple[str, str, Recipe]  # model, technique, recipe


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


def one(case: Case, device: str = "cuda") -> Step | None:
    """Plan and measure a step, in a fresh process; None where the machine's memory is too small.

    Raises what `measure` raises, and `gpu_layouts.one` for a step on two GPUs.
    """
    if on_two(case):
        return gpu_layouts.one(case)
    recipe, planned = case[-1], plan(case[-1], device)
    if device == "cpu":
        if not has_room(planned, psutil.virtual_memory().available):
            return None
        return Step(*case, planned=planned.peak, **measure(recipe, device))
    gpu = gpus.here()
    if not has_room(planned, gpu.memory):
        return None
    seen, peaks = measure(recipe, device), planned.allocator_peaks(gpu)
    return Step(
        *case,
        planned=planned.peak,
        planned_allocated=peaks.allocated,
        planned_reserved=peaks.reserved,
        planned_seconds=seconds_on(planned, gpu.name),
        **seen,
    )


def measure_all(
    folder: Path,
    command: str,
    until: float = float("inf"),
    only: list[Case] | None = None,
    jobs: int | None = None,
    device: str = "cuda",
) -> Outcome:
    """Measure what is missing in `folder`, and write each step to it as soon as it is measured.

    command  is kept in the record
    until    the moment (time.monotonic) after which no step goes on
    only     what an earlier call with the folder put off; None takes all that is missing, and puts
             off the steps that failed before, and after a failure on two GPUs all others on two
    jobs     processes side by side, whose memory must suffice; None: one on a CPU, else as JOBS,
             fewer on few cores
    device   "cuda" or "cpu"
    Raises ValueError for a rehearsal where the folder is that of the records, and for a file of
    this GPU there that cannot be read.
    """
    bf16 = device == "cpu" or gpus.here().bf16
    everything = every_case(torch.cuda.device_count() if device == "cuda" else 0, bf16)
    here = environment(device)
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
    jobs = jobs or (1 if device == "cpu" else max(1, min(JOBS, (os.cpu_count() or 1) // 2)))
    hung = threading.Event()

    def work(case: Case) -> Step | None:
        try:
            put_off = hung if on_two(case) else threading.Event()
            return _apart(case, until, put_off, jobs, device)
        except apart.Hung:
            if on_two(case):
                hung.set()
            raise

    def keep(case: Case, step: Step | None) -> str:
        if step is None:
            proof.large.append(name_of(case))
            return "too large for this machine"
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
    seconds = "" if step.seconds is None else f"; {step.seconds:.3f} s"
    planned = "" if step.planned_seconds is None else f", planned {step.planned_seconds:.3f}"
    return f"{step.off}{seconds}{planned}"


def _apart(
    case: Case, until: float, put_off: threading.Event, jobs: int, device: str = "cuda"
) -> Step | None:
    """`one` in a process of its own, one of `jobs`. Raises as `apart.run`."""
    if put_off.is_set():
        raise apart.PutOff
    if until - time.monotonic() < SECONDS:
        raise TimeoutError
    asked = json.dumps({"model": case[0], "technique": case[1], "recipe": case[2].to_dict()})
    command = [sys.executable, "-m", "benchmarks.measured_steps", "--device", device]
    limit = gpu_layouts.TIME_LIMIT if on_two(case) else LIMITS[device]
    answer = apart.run([*command, "--one", asked], until, limit, put_off, apart.threads(jobs))
    if answer == TOO_LARGE:
        return None
    try:
        return Step.from_dict(answer)
    except (TypeError, KeyError, ValueError) as error:
        raise RuntimeError(f"Its answer is no measured step ({error}).") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description="Plans against real steps.")
    parser.add_argument(
        "--jobs", type=whole_number(1, 1024), help="steps side by side, if memory suffices"
    )
    parser.add_argument(
        "--out", type=new_folder, default=FOLDER, help="a folder other than results/steps"
    )
    parser.add_argument(
        "--device", choices=LIMITS, help="by default the GPU where there is one that works"
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="only steps whose name contains this text; nothing is kept"
    )
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a step failed or there is none."""
    asked = _parser().parse_args(arguments)
    if asked.one:  # first of all: nothing else may have used the GPU in this process
        kept = json.loads(asked.one)
        case = kept["model"], kept["technique"], Recipe.from_dict(kept["recipe"])
        step = one(case, asked.device or "cuda")
        print(json.dumps(TOO_LARGE if step is None else step.to_dict()), flush=True)
        return 0
    works, why = usable_cuda()
    if asked.device == "cuda" and not works:
        print(
            f"Steps cannot be measured on a GPU here ({why}): leave --device out to measure them "
            "on the CPU.",
            file=sys.stderr,
        )
        return 1
    device = asked.device or ("cuda" if works else "cpu")
    typed = shlex.join(sys.argv[1:] if arguments is None else arguments)
    with tempfile.TemporaryDirectory() as nowhere:
        folder, only = asked.out, None
        if asked.only is not None:
            folder, every = Path(nowhere), every_case(2)
            only = [case for case in every if asked.only.lower() in name_of(case).lower()]
        command = f"{NAME} {typed}".strip()
        given = {"jobs": asked.jobs, "device": device}
        outcome = measure_all(folder, command, only=only, **given)
        if outcome.put_off and only is None:
            outcome = measure_all(folder, command, only=outcome.put_off, **given)
    if not outcome.proof.steps:
        print("No step was measured: nothing is kept.", file=sys.stderr)
        return 1
    if asked.only is None:
        print(f"Kept: {outcome.file} (what it holds is not measured again while it is there)")
    print(outcome.note, table(outcome.proof), sep="\n")
    failed = outcome.proof.failed
    if failed:
        print(
            f"{len(failed)} of {len(outcome.proof.steps) + len(failed)} steps failed and are "
            f"missing: {'; '.join(failed)}. The same command tries them again.",
            file=sys.stderr,
        )
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(run(main, NAME))

"""Real steps of other people's models on this machine's GPU: bytes, seconds and kernels.

    python -m benchmarks.gpu_models --out FOLDER [--minutes M] [--only TEXT]

`benchmarks.measured_steps` measures the course's recipes. These are the steps of `ModelStep`:
decoders, encoders, models of images and of speech, at full size with random weights and random
inputs, one technique at a time, compiled layers and FP8 among them. Each is built and measured in a
process of its own, and only one of them uses the GPU at a time. FP8 is torchao's; a compiled step
has each layer compiled by itself.

Beside what was measured stands "before": what the planner said of the step then.
`benchmarks.gpu_models_table` and `benchmarks.gpu_seconds` plan the steps anew.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import apart
from benchmarks.gpu_model_cases import CASES, step_of
from benchmarks.measure_step import alone_on_the_gpu, memory_on_a_gpu, seconds_on_a_gpu
from benchmarks.proof import machine
from helpers.profile import environment
from helpers.record import seconds_on
from tight_fit import gpus
from tight_fit.command.arguments import new_folder, whole_number
from tight_fit.command.wrapper import run
from tight_fit.files import replace_all
from tight_fit.models import made
from tight_fit.models.step import ModelStep
from tight_fit.packages import needs
from tight_fit.plans.model import batch, plan_model_step
from tight_fit.techniques import eight_bits, model_changes
from tight_fit.techniques.four_bits import count_parameters
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import tensor_cores, train_step
from tight_fit.trace.repeated_layers import layers

JOBS = 6  # processes side by side; one of them at a time uses the GPU
# Of steps that are compiled, which takes the CPU and happens beside the measurement of others: what
# so many of them hold together fits a GPU of 80 GB.
COMPILING_JOBS = 3
LIMIT = 150.0  # seconds of work of one step
SPARE = 25.0  # seconds that must be left for another step to begin
KERNELS = 60  # of a step's kernels, those that take longest


def measure(step: ModelStep) -> dict[str, Any]:
    """One step of a model on the first GPU.

    Returns {"allocated", "reserved": bytes; "seconds": the median of a step, whose inputs are there
    before it; "first": seconds of the first step, compilation included; "parameters": a count;
    "kernels": {name: [times, seconds]} of one step}.
    """
    with tensor_cores(step), ExitStack() as alone:
        if not step.compile:
            alone.enter_context(alone_on_the_gpu())
        return _measured(step, alone)


def _measured(step: ModelStep, alone: ExitStack) -> dict[str, Any]:
    model = on_the_gpu(step)
    optimizer, scaler = make_optimizer(model, step), make_scaler(step, "cuda")
    inputs = [
        {name: value.to("cuda") for name, value in batch(model, step).items()}
        for _ in range(step.accumulation)
    ]

    def once() -> None:
        train_step(model, optimizer, iter(inputs), step.batch_size, step, scaler=scaler)

    torch.cuda.synchronize()
    begun = time.perf_counter()
    once()
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    if step.compile:
        torch.cuda.empty_cache()
        alone.enter_context(alone_on_the_gpu())
    memory = memory_on_a_gpu(once)
    return {
        "allocated": memory["allocated"],
        "reserved": memory["reserved"],
        "seconds": seconds_on_a_gpu(once),
        "first": round(first, 3),
        "parameters": count_parameters(model.model),
        "kernels": kernels(once),
    }


def on_the_gpu(step: ModelStep) -> made.FlatLogits:
    """The model with random weights on the GPU, changed as the step asks."""
    plain = replace(step, float8=None, checkpointing=step.checkpointing and not step.compile)
    with torch.device("cuda"), model_changes.quiet():
        model = made.real(plain)
    model = model.to("cuda")
    if step.float8:
        multiply_as_torchao_does(model.model, step.float8)
    if step.compile:
        if step.checkpointing:
            model.model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers(model.model):
            layer.compile()
    return model


def multiply_as_torchao_does(model: nn.Module, recipe: str) -> None:
    """Convert the linear layers of the stacked layers, in place."""
    needs("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    wanted = eight_bits.layers_of(model)
    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, name: name in wanted,
    )


def kernels(once: Any) -> dict[str, list[float]]:
    """{name: [times, seconds]} of what the GPU runs in a step, those that take longest first."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():
        return {}
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            once()
            torch.cuda.synchronize()
    except Exception as error:  # a profiler that fails may not cost what has been measured
        print(f"The profiler failed: {error}", file=sys.stderr)
        return {}
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = found.setdefault(event.name[:160], [0, 0.0])
            entry[0] += 1
            entry[1] += event.time_range.elapsed_us() / 1e6
    longest = sorted(found.items(), key=lambda item: -item[1][1])
    other = longest[KERNELS:]
    kept = {name: [times, round(seconds, 7)] for name, (times, seconds) in longest[:KERNELS]}
    if other:
        kept["others"] = [
            sum(entry[0] for _, entry in other),
            round(sum(entry[1] for _, entry in other), 7),
        ]
    return kept


def planned(step: ModelStep, gpu: gpus.GPU) -> dict[str, Any]:
    """{"allocated", "reserved": bytes, "seconds"} by plan for a GPU; "why" it has none."""
    try:
        plan = plan_model_step(step.on(gpu.capability))
        peaks = plan.allocator_peaks(gpu)
    except Exception as error:  # a step that cannot be planned can be measured
        return {"why": " ".join(str(error).split())}
    seconds = seconds_on(plan, gpu.name)
    return {"allocated": peaks.allocated, "reserved": peaks.reserved, "seconds": seconds}


def file_of(environment: dict[str, Any]) -> str:
    """The file of a machine: its GPU, driver and versions, so that none takes another's place."""
    return re.sub(r"[^a-z0-9]+", "-", machine(environment).lower()).strip("-") + ".json"


def measure_all(
    folder: Path, command: str, until: float = float("inf"), only: str = "", jobs: int = JOBS
) -> dict[str, Any]:
    """Measure what is missing in `folder`, and write each step as soon as it is measured.

    command  is kept in the file
    until    the moment (time.monotonic) after which no step goes on
    only     a text that the names of the wanted steps hold
    Returns what the file holds. Raises ValueError in a rehearsal on a pretended GPU.
    """
    here = environment("cuda")
    if here.get("rehearsal"):
        raise ValueError("These models are at full size, which a pretended GPU cannot hold.")
    path = folder / file_of(here)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    kept: dict[str, Any] = {"environment": here, "date": now, "command": command, "failed": {}}
    kept["steps"] = {}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf8"))

    def work(name: str) -> dict[str, Any]:
        if until - time.monotonic() < SPARE:
            raise TimeoutError
        asked = [sys.executable, "-m", "benchmarks.gpu_models", "--one", name]
        return apart.run(asked, until, LIMIT, threading.Event(), apart.threads(jobs))

    def keep(name: str, seen: dict[str, Any]) -> str:
        kept["steps"][name] = seen
        return (
            f"{seen['allocated']:,} bytes, {seen['reserved']:,} reserved; "
            f"{seen['seconds']:.4f} s, first {seen['first']:.1f} s"
        )

    def save() -> None:
        replace_all(folder, {path.name: as_json(kept)})

    missing = [name for name in CASES if only in name and name not in kept["steps"]]
    missing.sort(key=lambda name: name in kept["failed"])
    for compiled in (False, True):
        side_by_side = min(jobs, COMPILING_JOBS) if compiled else jobs
        chosen = [name for name in missing if bool(CASES[name].get("compile")) is compiled]
        apart.side_by_side(chosen, side_by_side, work, str, kept["failed"], keep, save)
    return kept


def as_json(kept: dict[str, Any]) -> str:
    """The text of a file, a kernel a line."""
    text = json.dumps(kept, indent=1, allow_nan=False) + "\n"
    return re.sub(r"\[\s+([\d.e+-]+),\s+([\d.e+-]+)\s+\]", r"[\1, \2]", text)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where nothing was measured."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_models", description=__doc__)
    parser.add_argument(
        "--out",
        type=new_folder,
        required=True,
        help="where models.json is written, or gone on with",
    )
    parser.add_argument("--minutes", type=whole_number(1, 600), default=60, help="that it may take")
    parser.add_argument("--only", default="", help="steps whose name holds this text")
    parser.add_argument("--jobs", type=whole_number(1, 64), default=JOBS, help="side by side")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.one:
        step = step_of(asked.one)
        print(json.dumps({"before": planned(step, gpus.here()), **measure(step)}), flush=True)
        return 0
    command = f"python -m benchmarks.gpu_models --minutes {asked.minutes}"
    kept = measure_all(asked.out, command, begun + 60 * asked.minutes, asked.only, asked.jobs)
    left = [name for name in CASES if name not in kept["steps"] and name not in kept["failed"]]
    print(f"{len(kept['steps'])} measured, {len(kept['failed'])} failed, left: {left}")
    return int(not kept["steps"])


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m benchmarks.gpu_models"))

"""The command `tight-fit calibrate`: measure the GPU at hand, for plans of its own time.

It writes one file of plain JSON (`tight_fit.gpus.calibration`), which plans of this GPU take from
then on, and prints by how much steps were missed that nothing was fitted to, before and after.

Exit status: 0 where the file was written, 2 without a CUDA GPU that runs (one sentence).
"""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tight_fit.command.arguments import OneLineParser, new_file, whole_number
from tight_fit.command.progress import Progress
from tight_fit.command.wrapper import importing, sentence
from tight_fit.files import replace_all
from tight_fit.gpus import GPU, REHEARSAL, calibration
from tight_fit.gpus.names import matches
from tight_fit.gpus.table import SPECS, GpuSpecs
from tight_fit.units import duration

if TYPE_CHECKING:
    from tight_fit.kernels.measure_gpu import GpuTimes
    from tight_fit.models.step import ModelStep

NAME = "tight-fit calibrate"
LIMIT = 60  # seconds
MEASURING = 0.5  # of them; the rest is for the steps that show how good it is
# Models of which nothing is measured before: (name, examples, tokens).
CHECKS = (
    ("sentence-transformers/all-MiniLM-L6-v2", 32, 128),
    ("google-bert/bert-base-uncased", 16, 128),
    ("openai-community/gpt2-medium", 4, 512),
)
WARM_UP, TIMED = 2, 5  # steps
QUERIES = "driver_version,power.limit,clocks.max.sm,clocks.sm,temperature.gpu"

Facts = dict[str, Any]


def main(arguments: Sequence[str] | None = None, prog: str = NAME) -> int:
    """Run the command and return the exit status; argparse itself exits with 2."""
    options = OneLineParser(
        prog=prog,
        description="Measure the first GPU of this machine in at most a minute, write one file of "
        "JSON that plans of its time take from then on, and print by how much plans of steps were "
        "off before and after. Nothing else may run on the GPU meanwhile.",
    )
    options.add_argument(
        "--out",
        metavar="FILE",
        type=new_file,
        help=f"where to write it; plans look in the usual place ({calibration.usual_place()}), or "
        f"where --calibration or {calibration.VARIABLE} says",
    )
    options.add_argument(
        "--seconds",
        metavar="N",
        type=whole_number(20, 600),
        default=LIMIT,
        help=f"the longest that it may take ({LIMIT})",
    )
    asked = options.parse_args(arguments)
    begin = time.perf_counter()
    progress = Progress()
    progress.say("loading PyTorch")
    try:
        with importing():
            why = unusable()
    except ModuleNotFoundError as error:
        options.error(f"to measure a GPU needs {error.name}: pip install -r requirements.txt.")
    if why:
        options.error(why)
    path = asked.out or calibration.usual_place()
    with calibration.chosen(calibration.NONE):
        facts = calibrated(begin, asked.seconds, progress.say)
    try:
        replace_all(path.parent, {path.name: json.dumps(facts, indent=1) + "\n"})
    except OSError as error:
        options.error(sentence(error))
    progress.clear()
    print("\n".join(lines(facts, path)))
    return 0


def unusable() -> str:
    """Why there is no GPU to measure here, "" where there is one."""
    import torch

    if not torch.cuda.is_available():
        return (
            "there is no CUDA GPU here, or this PyTorch cannot see it: run it on the machine whose "
            "GPU shall be measured, with a PyTorch built for CUDA."
        )
    try:
        torch.zeros(8, device="cuda").add_(1).sum().item()
    except Exception as error:  # no kernels for this GPU, a driver too old: each its own type
        said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        return f"the GPU here runs no kernel of this PyTorch ({said}): install one built for it."
    return ""


def calibrated(begin: float, limit: float, say: Callable[[str], object]) -> Facts:
    """What the file holds: the GPU at hand, measured.

    begin  time.perf_counter() when the command began
    limit  seconds from then on
    """
    import torch

    from tight_fit.kernels import fit_gpu, measure_gpu

    properties = torch.cuda.get_device_properties(0)
    gpu = named(properties.name, properties.total_memory, (properties.major, properties.minor))
    row = SPECS.get(gpu.name)
    until = begin + MEASURING * limit
    found = measure_gpu.measure(row, gpu.memory, until, say)
    cache = getattr(properties, "L2_cache_size", 0) or 4 * 2**20
    figures = row or fit_gpu.figures_of(gpu, found, properties.multi_processor_count, cache)
    say("fitting")
    today = date.today().isoformat()
    # What it holds under load was measured: what papers state of it does not count.
    figures = figures._replace(rates=None, attention=(), sustained=0.0)
    specs = figures._replace(rates=fit_gpu.rates_of(found, figures, today))
    checked = _checked(gpu, specs, row, begin + limit, say)
    made = {
        "date": today,
        "seconds": round(time.perf_counter() - begin, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.system(),  # and no more of a machine whose file is sent
        "rehearsal": bool(os.environ.get(REHEARSAL)),
        **_driver(),
    }
    return calibration.as_json(
        gpu, specs, properties.name, made, checked=checked, measured=_rows(found)
    )


def named(device: str, memory: int, capability: tuple[int, int]) -> GPU:
    """The GPU of the table that a driver names, the one whose memory is nearest; else its own."""
    found = [gpu for gpu in matches(device) if gpu.capability == capability]
    if not found:
        return GPU(device, memory, capability)
    return min(found, key=lambda gpu: abs(gpu.memory - memory))


def _checked(
    gpu: GPU, specs: GpuSpecs, row: GpuSpecs | None, until: float, say: Callable[[str], object]
) -> list[Facts]:
    """Steps of models, measured and planned by the table's figures and by those that are new."""
    from tight_fit.command.answer import quietly
    from tight_fit.models.step import ModelStep
    from tight_fit.plans.model import plan_model_step

    checked = []
    precision = "bf16" if specs.bf16 else "fp16" if specs.fp16 else "fp32"
    for name, examples, tokens in CHECKS:
        say(f"a step of {name}")
        with quietly():
            step = ModelStep.of(name, batch_size=examples, length=tokens, precision=precision)
            step = step.on(gpu.capability)
            plan = plan_model_step(step)
            planned = plan.seconds(specs).total
            left = until - time.perf_counter()
            if not plan.fits(gpu) or (WARM_UP + TIMED) * planned > left:
                continue
            measured = step_seconds(step, until)
        checked.append(
            {
                "model": name,
                "batch_size": examples,
                "length": tokens,
                "precision": precision,
                "measured": measured,
                "table": None if row is None else plan.seconds(row).total,
                "calibrated": planned,
            }
        )
    return checked


def step_seconds(step: ModelStep, until: float) -> float:
    """The median of some real steps on the GPU, in seconds, by CUDA events."""
    import torch

    from tight_fit.models.made import real
    from tight_fit.plans.model import batch
    from tight_fit.techniques.optimizers import make_optimizer, make_scaler
    from tight_fit.techniques.step import tensor_cores, train_step

    with torch.device("cuda"):
        model = real(step)
    optimizer, scaler = make_optimizer(model, step), make_scaler(step, "cuda")
    inputs = {name: value.cuda() for name, value in batch(model, step).items()}
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: list[float] = []
    with tensor_cores(step):
        for number in range(WARM_UP + TIMED):
            torch.cuda.synchronize()
            marks[0].record()
            train_step(model, optimizer, [inputs], step.batch_size, step, scaler=scaler)
            marks[1].record()
            torch.cuda.synchronize()
            late = time.perf_counter() > until
            if number >= WARM_UP or late:
                times.append(marks[0].elapsed_time(marks[1]) / 1e3)
            if late:
                break
    del model, optimizer, inputs
    gc.collect()
    torch.cuda.empty_cache()
    return statistics.median(times)


def _driver() -> Facts:
    """What nvidia-smi says of the first GPU while it multiplies; empty where it says nothing."""
    import torch

    if not shutil.which("nvidia-smi"):
        return {}
    square = torch.randn(4096, 4096, device="cuda")
    once = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    once[0].record()
    square @ square
    once[1].record()
    torch.cuda.synchronize()
    for _ in range(min(5000, int(2000 / max(once[0].elapsed_time(once[1]), 0.1)))):
        square @ square  # two seconds of work, beside which clocks are read
    asked = ["nvidia-smi", f"--query-gpu={QUERIES}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    torch.cuda.synchronize()
    said = [part.strip() for part in done.stdout.split(",")]
    names = ("driver", "power limit, W", "highest clock, MHz", "clock, MHz", "temperature, C")
    return dict(zip(names, said)) if len(said) == len(names) else {}


def _rows(found: GpuTimes) -> Facts:
    """The times themselves, for those who look at the file or fit it anew."""
    traced, seconds = found.step
    return {
        "kernels": [
            {"seconds": one.seconds, "tf32": one.tf32, "ops": [list(op) for op in one.ops]}
            for one in found.kernels
        ],
        "small step": {"seconds": list(seconds), "operations": len(traced.issued())},
        "link": found.link,
    }


def lines(facts: Facts, path: Path) -> list[str]:
    """What is printed: the GPU's rates, and steps planned before and after."""
    specs, rates, made = facts["specs"], facts["rates"], facts["made"]
    name = facts["gpu"]["name"]
    text = [f"{name} ({facts['gpu']['device']}), measured in {made['seconds']:.0f} s."]
    for arithmetic in ("fp32", "tf32", "fp16", "bf16"):
        fastest = max(
            (
                one["ops"][0][3] / one["seconds"]
                for one in facts["measured"]["kernels"]
                if one["ops"][0][1] == "matmul"
                and arithmetic == ("tf32" if one["tf32"] else one["ops"][0][2])
            ),
            default=None,
        )
        if fastest is not None:
            text.append(f"  products in {arithmetic}   {fastest / 1e12:8.1f} TFLOP/s")
    moved = rates["moving"]["elementwise"] * specs["bandwidth"]
    text += [
        f"  memory             {moved / 1e9:8.1f} GB/s",
        f"  to and from host   {rates['link'] / 1e9:8.1f} GB/s",
        f"  launches           {rates['dispatch']:8.2f} times the seconds of the usual plan",
        "",
    ]
    if not facts["checked"]:
        text.append("No step was measured beside its plan: there was no time, or no room, for one.")
    else:
        text.append("Steps of models that nothing was fitted to, planned / measured - 1:")
        text.append(f"  {'':48} {'measured':>10} {'before':>8} {'after':>8}")
    for step in facts["checked"]:
        words = f"{step['model']}, {step['batch_size']} × {step['length']}, {step['precision']}"
        before = "-" if step["table"] is None else f"{step['table'] / step['measured'] - 1:+.0%}"
        after = f"{step['calibrated'] / step['measured'] - 1:+.0%}"
        text.append(f"  {words:48} {duration(step['measured']):>10} {before:>8} {after:>8}")
    used = path == calibration.usual_place()
    text += ["", f"Written to {path}."]
    text.append(
        f"Plans for the {name} take it from now on (--calibration none plans without it)."
        if used
        else f"Plans for the {name} take it with --calibration {path}."
    )
    return text

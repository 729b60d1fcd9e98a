"""The paragraphs of docs/accuracy.md on what was measured here: real steps, and runs on GPUs.

Each paragraph is a template whose fields are filled from measurements kept in the repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import gpu_models_table, markdown
from benchmarks import proof as measured
from helpers.record import Run
from helpers.tables import Table
from tight_fit.units import size
from tools.course import records

FAR = 0.05  # a CPU's step that the plan misses by more than this is named

STEPS = (
    "**Against real steps of the full models, on {machine}.** {count} steps of {models}, a "
    "technique each ({date}, PyTorch {torch}). {result}"
    "[results/steps](../results/steps) has every step.\n\n"
)
STEPS_ON_A_GPU = (
    "The plan misses the allocated peak by {misses.mean:.2%} in the mean and by "
    "{misses.worst:+.2%} at worst. "
)
STEPS_ON_A_CPU = (
    "In {exact} of them the plan is what PyTorch's allocator recorded, to the byte; it misses "
    "{far}the others by {near:.1%} at most, {near_bytes} "
    "([benchmarks/measure_step.py](../benchmarks/measure_step.py) says of what). In the mean it is "
    "{misses.mean:.2%}. A CPU's kernels keep other tensors than a GPU's. "
)
FAR_STEP = "{model} with {technique} by {miss:+.1%}"
BITSANDBYTES = (
    " (bitsandbytes' CPU kernel takes copies of the vocabulary inside itself, which a GPU's does "
    "not)"
)
RECORDS = (
    "**Against our own GPUs.** Over the {count} runs in `results/`, the plan misses CUDA's "
    "allocated peak by {misses.mean:.1%} in the mean and by {misses.worst:+.1%} at worst "
    "({run}, {gpu}).\n\n{table}"
)
NO_RECORDS = "No lesson has been recorded on a GPU yet."


class Misses(NamedTuple):
    """Relative errors of several plans: the mean of their sizes, and the largest with its sign."""

    mean: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Misses:
        return cls(sum(map(abs, errors)) / len(errors), max(errors, key=abs))


def text() -> str:
    """All paragraphs: measured steps of each machine, other models, records from GPUs."""
    return "".join(map(of_steps, measured.read())) + gpu_models_table.sentences() + of_records()


def of_steps(proof: measured.Proof) -> str:
    """The plan beside the real steps of one machine, every technique, from results/steps/."""
    on_cpu = proof.environment["device"] == "cpu"
    return STEPS.format(
        machine="a CPU" if on_cpu else f"our {proof.environment['name']}",
        count=len(proof.steps),
        models=", ".join(dict.fromkeys(_model(step) for step in proof.steps)),
        date=proof.date[:10],
        torch=proof.environment["torch"].split("+")[0],
        result=_on_a_cpu(proof.steps) if on_cpu else _on_a_gpu(proof.steps),
    )


def _on_a_gpu(steps: Sequence[measured.Step]) -> str:
    return STEPS_ON_A_GPU.format(misses=Misses.of([step.miss for step in steps]))


def _on_a_cpu(steps: Sequence[measured.Step]) -> str:
    far = [step for step in steps if abs(step.miss) > FAR]
    near = max((step for step in steps if step not in far), key=lambda step: abs(step.miss))
    return STEPS_ON_A_CPU.format(
        exact=sum(step.planned == step.allocated for step in steps),
        far=_named(far),
        near=abs(near.miss),
        near_bytes=size(abs(near.planned - near.allocated)),
        misses=Misses.of([step.miss for step in steps]),
    )


def _named(far: Sequence[measured.Step]) -> str:
    """The steps that the plan misses by much, and why where that is known; empty without any."""
    if not far:
        return ""
    named = [
        FAR_STEP.format(model=_model(step), technique=step.technique, miss=step.miss)
        for step in far
    ]
    why = BITSANDBYTES if all(step.inside_bitsandbytes for step in far) else ""
    return f"{', '.join(named)}{why}, and "


def _model(step: measured.Step) -> str:
    return step.model.split(",")[0]


def of_records() -> str:
    """The plan beside the GPU runs in results/, or that there is none yet."""
    runs = [run for run in records.read_all() if run.environment["device"] == "cuda"]
    if not runs:
        return NO_RECORDS
    runs.sort(key=lambda run: -abs(run.miss))
    return RECORDS.format(
        count=len(runs),
        misses=Misses.of([run.miss for run in runs]),
        run=runs[0].name,
        gpu=markdown.cell(runs[0].environment["name"]),
        table=markdown.of(Table([_row(run) for run in runs])),
    )


def _row(run: Run) -> dict[str, str]:
    return {
        "run": run.name,
        "model": f"{run.recipe.model}, {run.recipe.profile}",
        "GPU": run.environment["name"],
        "planned": size(run.planned),
        "allocated": size(run.memory["allocated"]),
        "miss": f"{run.miss:+.1%}",
        "reserved, planned": size(run.plan["reserved"]),
        "reserved": size(run.memory["reserved"]),
    }

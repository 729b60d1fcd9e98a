"""Planned memory and planned time of a few recipes side by side, in one call from a lesson.

    show_plans({"before": before, "after": after})
    show_phases({"before": before, "after": after}, "T4")

Nothing is run: a recipe is planned in a second or two, and the tables are the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from helpers.plan.planner import plan
from helpers.recipe import Recipe
from helpers.tables import Table
from tight_fit.checks import each_of_type
from tight_fit.gpus import GPU, as_gpu
from tight_fit.kernels.kernel_time import constants
from tight_fit.kernels.step_seconds import lacks
from tight_fit.memory.plan import Plan
from tight_fit.optimizer_kinds import KINDS
from tight_fit.plans.own_step import CustomStepPlan
from tight_fit.techniques.settings import StepSettings
from tight_fit.units import size, span

# What many readers have: Colab's and Kaggle's GPU, one for games, and a data centre's.
SHOWN = ("T4", "RTX 3060", "A100-40GB")
# What a caption says of a step's precision and optimizer: they decide how long a step takes.
PRECISIONS = {
    "fp32": "fp32 without TF32",
    "tf32": "fp32 with TF32",
    "bf16": "bf16 autocast",
    "fp16": "fp16 autocast",
}


def show_plans(named: Mapping[str, Recipe | Plan], gpus: Sequence[str | GPU] = SHOWN) -> Table:
    """A row per recipe: the planned peak of memory, and the planned time of a step on each GPU.

    named  {label: a recipe, which is planned here, or a plan for "cuda" that is made already, also
           of a model of transformers (`plan_model`) or of a step of one's own (`plan_custom_step`)}
    gpus   names of `gpus.GPUS`

    Behind a time stands what multiple it is of the first row's that has one on that GPU. "does not
    fit" says that the GPU has too little memory, "no bf16" that it lacks this arithmetic. Recipes
    are planned as they are: a lesson on the models that readers come for gives `profile="full"`.
    Raises ValueError for no recipe, an unknown GPU, and a plan without seconds (for a CPU).
    """
    plans, first = _planned(named), dict[str, float]()
    rows = []
    for label, planned in plans.items():
        row = {"planned": label, "peak": size(planned.peak)}
        for gpu in map(as_gpu, gpus):
            row[gpu.name] = _cell(planned, gpu, first)
        rows.append(row)
    used = settings(planned.recipe for planned in plans.values())
    return Table(rows, f"Planned, not run: a step's memory and time, {used}. {within()}")


def show_phases(named: Mapping[str, Recipe | Plan], gpu: str | GPU) -> Table:
    """A row per recipe: the planned time of a step on one GPU, and the share of each phase.

    "recompute" is the forward passes that gradient checkpointing repeats. "waiting" is the part of
    the whole step in which the GPU waits for the CPU to launch a kernel; it lies in the phases.
    The arguments, and what is raised, are those of `show_plans`; ValueError as well where the GPU
    lacks an arithmetic of a step. Whether the GPU holds the step is not asked.
    """
    gpu = as_gpu(gpu)
    plans, rows = _planned(named), []
    for label, planned in plans.items():
        took = planned.seconds(gpu)
        shares = {name: f"{seconds / took.total:.0%}" for name, seconds in took.phases.items()}
        waiting = f"{took.waiting / took.total:.0%}"
        rows.append({"planned": label, "step": span(took.total), **shares, "waiting": waiting})
    used = settings(planned.recipe for planned in plans.values())
    return Table(rows, f"Planned for the {gpu.name}, not run: a step's time, {used}. {within()}")


def settings(steps: Iterable[StepSettings]) -> str:
    """Precisions and optimizers of some steps, as the end of a sentence, each named once."""
    used = list(steps)
    precisions = dict.fromkeys(PRECISIONS[step.precision] for step in used)
    optimizers = dict.fromkeys(KINDS[step.optimizer].label for step in used)
    return f"in {' or '.join(precisions)}, with {' or '.join(optimizers)}"


def within() -> str:
    """A sentence on how far measured steps were from planned ones (docs/gpu-time.md)."""
    error = constants()["shared"]["error"]
    return f"Nine of ten times are within {max(error.values()):.0%}."


def _planned(named: Mapping[str, Recipe | Plan]) -> dict[str, Plan]:
    each_of_type("named", named, (Recipe, Plan, CustomStepPlan))
    return {
        label: plan(given) if isinstance(given, Recipe) else given for label, given in named.items()
    }


def _cell(planned: Plan, gpu: GPU, first: dict[str, float]) -> str:
    """The time of a step on a GPU; `first` gets the time of the first row that has one there."""
    if planned.operations is not None and (lacking := lacks(planned.operations, gpu)):
        return f"no {lacking}"
    if not planned.fits(gpu):
        return "does not fit"
    took = planned.seconds(gpu)
    if gpu.name not in first:
        first[gpu.name] = took.total
        return span(took.total)
    return f"{span(took.total)} (× {took.total / first[gpu.name]:.2f})"

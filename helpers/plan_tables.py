"""Tables of plans: steps on one GPU, layouts over several, long texts, searches, the ladder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from helpers import kept_layouts, ladder
from helpers.plan import plan
from helpers.recipe import Recipe
from helpers.tables import Table
from tight_fit.checks import each_of_type, of_type
from tight_fit.command.answer import attention_of
from tight_fit.gpus import GPU, as_gpu
from tight_fit.kernels.kernel_time import constants
from tight_fit.kernels.step_seconds import lacks
from tight_fit.kernels.trace_ops import TracedOps
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout, parse
from tight_fit.memory.plan import Plan
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import KINDS
from tight_fit.plans.own_step import CustomStepPlan
from tight_fit.techniques.settings import StepSettings
from tight_fit.units import duration, number, size, span

# What many readers have: Colab's and Kaggle's GPU, one for games, and a data centre's.
SHOWN = ("T4", "RTX 3060", "A100-40GB")
# What a caption says of a step's precision and optimizer: they decide how long a step takes.
PRECISIONS = {
    "fp32": "fp32 without TF32",
    "tf32": "fp32 with TF32",
    "bf16": "bf16 autocast",
    "fp16": "fp16 autocast",
}
LADDER = (
    "DeBERTa-v3-large, 16 examples of 512 tokens; fp32 without TF32 and fused AdamW where no rung "
    "says otherwise, eager attention, not compiled."
)
AS_MUCH = "bf16 takes as much"  # memory, and time within 3 %, where a GPU has it
COMPUTED = {
    "fp32": "computed in fp32 without TF32",
    "tf32": "computed in fp32 with TF32",
    "bf16": "computed in bf16",
    "fp16": "computed in fp16 with loss scaling",
}


def layouts(job: ModelStep, named: Mapping[str, Any], cluster: Cluster) -> Table:
    """A row per layout: memory and messages of one GPU, and the planned time of a step.

    job      the step: its batch size is that of all GPUs
    named    {label: a `Layout`, or a pair of one and a step that replaces the job}
    cluster  the GPUs and the links between them
    Nothing is run. A row that does not fit says by how much; the caption names in what a row's own
    step differs. Raises TypeError for what is no step, ValueError for a layout that the cluster or
    the step cannot have.
    """
    of_type("job", job, ModelStep)
    caption, rows = f"Planned, nothing was run: {cluster}; {in_words(job)}", []
    for label, entry in named.items():
        layout, step = entry if isinstance(entry, tuple) else (entry, job)
        rows.append(_row_of_step(label, step, layout, cluster))
        same = in_words(job).split(", ")
        if own := [words for words in in_words(step).split(", ") if words not in same]:
            caption += f"; {label}: {', '.join(own)}"
    return Table(rows, f"{caption}.")


def in_words(job: ModelStep) -> str:
    """Weights, precision, optimizer, attention and recomputation of a step."""
    taken = attention_of(job)
    attention = f"{'fused (sdpa)' if taken == 'sdpa' else taken} attention"
    again = ", gradient checkpointing" if job.checkpointing else ""
    again += ", the loss in chunks" if job.loss == "chunked" else ""
    weights = f"{job.weights} weights, {COMPUTED[job.precision]}"
    return f"{weights}, {KINDS[job.optimizer].label}, {attention}{again}, not compiled"


def _row_of_step(label: str, job: ModelStep, layout: Layout, cluster: Cluster) -> dict[str, str]:
    facts = kept_layouts.facts(job, layout, cluster)
    sent = sum(sum(kinds.values()) for kinds in facts["sent"].values())
    over = facts["need"] - facts["card_memory"]
    things, count = "tokens", job.batch_size * (job.tokens or 0)
    if not count:
        things, count = "images", job.batch_size
    return {
        "layout": label,
        "need per GPU": size(facts["need"]),
        "fits": "yes" if facts["fits"] else f"no, {size(over)} too much",
        "sent per GPU and step": size(sent) if sent else "nothing",
        "time per step": span(facts["seconds"]),
        f"{things} per second": f"{count / facts['seconds']:,.0f}",
    }


def contexts(gpus: int = 8) -> Table:
    """A row per length and layout of `kept_layouts.TEXTS`: bytes per GPU, and the step's time.

    gpus  8 for Llama 3.1 8B on H100s, with what was published; 2 for Llama 3.2 1B on two RTX 4090
    Nothing is planned here: the plans are kept with the package. Raises KeyError for another number
    of GPUs.
    """
    texts, rows = kept_layouts.TEXTS[gpus], []
    for (length, layout), facts in kept_layouts.of_texts(gpus).items():
        sent = facts["sent"].get("context", {})
        row = {
            "tokens": f"{length:,}",
            "layout": layout,
            "need per GPU": size(facts["need"]),
            "fits": "yes" if facts["fits"] else "no",
            "activations": size(facts["at_peak"].get("activations", 0)),
            "keys and values sent": size(sum(sent.values())) if sent else "nothing",
            "time per step": span(facts["seconds"]),
            "tokens per second": f"{parse(layout).data * length / facts['seconds']:,.0f}",
        }
        if gpus == 8:
            published = kept_layouts.PUBLISHED.get((length, layout))
            row["published"] = f"{published * gpus:,}" if published else ""
        rows.append(row)
    caption = (
        f"Planned, nothing was run: {texts.model.partition('/')[2]} on {texts.cluster}, a text per "
        "data rank; fp32 weights, computed in bf16, fused AdamW, fused (sdpa) attention, gradient "
        "checkpointing, the loss in chunks, not compiled."
    )
    if gpus == 8:
        caption += (
            " 262,144 tokens are twice as many as the model was made for. Published: torchtitan's, "
            "with torch.compile and float8, which the plan leaves out."
        )
    return Table(rows, caption)


def large(name: str, most: int = 4) -> Table:
    """The best layouts of a job that is searched, the best first, and the published one.

    The last column marks what torchtitan published, with its tokens per second and GPU; a job of
    `kept_layouts.OWNED` has no such column.

    Nothing is planned here: the plans are kept with the package. Raises KeyError for another name.
    """
    job, found = (kept_layouts.JOBS | kept_layouts.OWNED)[name], kept_layouts.kept_searches()[name]
    published, rows = found["published"], found["rows"][:most]
    rows += [published] if published and published not in rows else []
    marks = [{"published": _measured(job) if row == published else ""} for row in rows]
    return Table(
        [_line(row) | (mark if published else {}) for row, mark in zip(rows, marks)],
        f"Planned, nothing was run: {_model(job)} on {job.cluster}, {_examples(job)}; "
        f"{in_words(job.step)}.",
    )


def owned() -> Table:
    """A row per job of `kept_layouts.OWNED`: what the search takes, and one GPU beside it.

    Nothing is planned here: the plans are kept with the package.
    """
    rows = []
    for name, job in kept_layouts.OWNED.items():
        found = kept_layouts.kept_searches()[name]
        best, alone = found["rows"][0], found["alone"]
        rows.append(
            {
                "GPUs": name,
                "step": f"{_model(job)}, {_examples(job)}",
                **_line(best),
                "one GPU": duration(alone) if alone else "does not fit",
            }
        )
    return Table(
        rows,
        "Planned, nothing was run: the layout that a search takes, a row per job; computed in bf16 "
        "but for the fp16 of the T4, fused AdamW, fused (sdpa) attention, not compiled.",
    )


def _model(job: kept_layouts.SearchJob) -> str:
    name = "Llama-3.1-70B" if job.model == "70B" else job.model.split("/")[-1]
    return name.replace("-", " ")


def _examples(job: kept_layouts.SearchJob) -> str:
    return f"{job.step.batch_size} examples of {job.step.tokens:,} tokens per step"


def _measured(job: kept_layouts.SearchJob) -> str:
    eager, compiled = job.measured
    return f"torchtitan's: {f'{eager:,}, ' if eager else ''}compiled {compiled:,}"


def _line(row: kept_layouts.Facts) -> dict[str, str]:
    return {
        "layout": row["layout"],
        "recomputation": row["recompute"],
        "micro-batches": str(row["micro_batches"]),
        "need per GPU": size(row["need"]),
        "time per step": duration(row["seconds"]),
        "tokens per second and GPU": f"{row['tokens_per_second_per_gpu']:,.0f}",
    }


def rungs() -> Table:
    """A row per rung: what it changes, the peak, FLOPs, and the smallest GPU that holds it."""
    changes = ladder.rungs(ladder.START)
    plans = {name: plan(recipe) for name, recipe in ladder.climb(ladder.START).items()}
    first = plans[ladder.FIRST]
    rows = []
    for name, rung in plans.items():
        fields = ", ".join(f"{field}={value!r}" for field, value in changes[name].items())
        smallest = ladder.smallest(rung)
        rows.append(
            {
                "rung": name,
                "adds": fields or "(start)",
                "peak": size(rung.peak),
                "of the start": f"{rung.peak / first.peak:.0%}",
                "FLOPs per step": number(_flops(rung)),
                "smallest GPU": f"{smallest[0].name} in {smallest[1]}" if smallest else "none",
            }
        )
    return Table(rows, f"Planned, nothing was run: {LADDER}")


def savings() -> Table:
    """A row per technique: what it saves alone, on its rung, and taken away from the top."""
    start, full = plan(ladder.START), plan(ladder.top(ladder.START))
    climbed = {name: plan(recipe) for name, recipe in ladder.climb(ladder.START).items()}
    below = dict(zip(list(climbed)[1:], climbed.values()))
    alone, without = ladder.alone(ladder.START), ladder.without(ladder.START)
    rows = []
    for name in without:
        away = plan(without[name])
        rows.append(
            {
                "technique": name,
                "alone": size(start.peak - plan(alone[name]).peak),
                "on its rung": size(below[name].peak - climbed[name].peak),
                "taken away": size(away.peak - full.peak),
                "FLOPs without it": f"{_flops(away) / _flops(full) - 1:+.0%}",
            }
        )
    return Table(
        rows, f"Planned: bytes of the peak that each technique saves, asked in three ways: {LADDER}"
    )


def _flops(planned: Plan) -> int:
    return sum(planned.flops.values())


def techniques(*fields: str) -> Table:
    """All techniques for one GPU side by side, by plan at full size.

    An arrow marks those that change one of `fields` of the recipe.
    """
    marked = [
        {"": "→" if any(row["recipe"].startswith(f"{field}=") for field in fields) else ""} | row
        for row in ladder.rows()
    ]
    return Table(
        marked,
        "Plan for a GPU: peak of one optimizer step at full size, the smallest GPU that holds it, "
        "and the step's time, × what the plain step takes",
    )


def plans(named: Mapping[str, Recipe | Plan], gpus: Sequence[str | GPU] = SHOWN) -> Table:
    """A row per recipe: the planned peak of memory, and the planned time of a step on each GPU.

    named  {label: a recipe, which is planned here, or a plan for "cuda" that is made already, also
           of a model of transformers (`plan_model`) or of a step of one's own (`plan_custom_step`)}
    gpus   names of `gpus.GPUS`

    Behind a time stands what multiple it is of the first row's that has one on that GPU. "does not
    fit" says that the GPU has too little memory, "no bf16" that it lacks this arithmetic. Recipes
    are planned as they are: a lesson on the models that readers come for gives `profile="full"`.
    Raises ValueError for no recipe, an unknown GPU, and a plan without seconds (for a CPU).
    """
    made, first = _planned(named), dict[str, float]()
    rows = []
    for label, planned in made.items():
        row = {"planned": label, "peak": size(planned.peak)}
        for gpu in map(as_gpu, gpus):
            row[gpu.name] = cell(planned, gpu, first)
        rows.append(row)
    used = settings(made.values())
    return Table(rows, f"Planned, not run: a step's memory and time, {used}. {within()}")


def phases(named: Mapping[str, Recipe | Plan], gpu: str | GPU) -> Table:
    """A row per recipe: the planned time of a step on one GPU, and the share of each phase.

    "recompute" is the forward passes that gradient checkpointing repeats. "waiting" is the part of
    the whole step in which the GPU waits for the CPU to launch a kernel; it lies in the phases.
    The arguments, and what is raised, are those of `plans`; ValueError as well where the GPU
    lacks an arithmetic of a step. Whether the GPU holds the step is not asked.
    """
    gpu = as_gpu(gpu)
    made, rows = _planned(named), []
    for label, planned in made.items():
        took = planned.seconds(gpu)
        shares = {name: f"{seconds / took.total:.0%}" for name, seconds in took.phases.items()}
        waiting = f"{took.waiting / took.total:.0%}"
        rows.append({"planned": label, "step": span(took.total), **shares, "waiting": waiting})
    used = settings(made.values())
    return Table(rows, f"Planned for the {gpu.name}, not run: a step's time, {used}. {within()}")


def settings(plans: Iterable[Any]) -> str:
    """Precisions, optimizers and attention of some plans, as a sentence's end, each named once.

    fp16 alone is what a T4 computes in; readers of other GPUs take bf16, of which the same is true.
    """
    made = list(plans)
    used: list[StepSettings] = [planned.recipe for planned in made]
    precisions = dict.fromkeys(PRECISIONS[step.precision] for step in used)
    if PRECISIONS["bf16"] not in precisions:
        more = {PRECISIONS["fp16"]: f"{PRECISIONS['fp16']} ({AS_MUCH})"}
        precisions = dict.fromkeys(more.get(name, name) for name in precisions)
    optimizers = dict.fromkeys(KINDS[step.optimizer].label for step in used)
    attention = dict.fromkeys(
        "fused (sdpa)" if _is_fused(planned.operations) else "eager" for planned in made
    )
    return (
        f"in {' or '.join(precisions)}, with {' or '.join(optimizers)}, "
        f"{' or '.join(attention)} attention, not compiled"
    )


def _is_fused(operations: TracedOps) -> bool:
    return any(op.kind == "attention" for ops in operations.ops for op in ops)


def within() -> str:
    """A sentence on how far measured steps were from planned ones (docs/gpu-time.md)."""
    error = constants()["shared"]["error"]
    return f"Nine of ten times are within {max(error.values()):.0%}."


def _planned(named: Mapping[str, Recipe | Plan]) -> dict[str, Plan]:
    each_of_type("named", named, (Recipe, Plan, CustomStepPlan))
    return {
        label: plan(given) if isinstance(given, Recipe) else given for label, given in named.items()
    }


def cell(planned: Plan, gpu: GPU, first: dict[str, float] | None = None) -> str:
    """The time of a step on a GPU; `first` gets the time of the first row that has one there."""
    if planned.operations is not None and (lacking := lacks(planned.operations, gpu)):
        return f"no {lacking}"
    if not planned.fits(gpu):
        return "does not fit"
    took = planned.seconds(gpu).total
    if first is None:
        return span(took)
    if gpu.name not in first:
        first[gpu.name] = took
        return span(took)
    return f"{span(took)} (× {took / first[gpu.name]:.2f})"

"""What lessons show with one call: tables, with the sentence that reads them.

from helpers import show

show.before_and_after(before, after)  # two runs: memory, time, accuracy, and the record
show.plans({"before": before, "after": after})  # memory and seconds at full size, per GPU
show.phases({"before": before, "after": after}, "T4")  # where the time of a step goes
show.layouts(job, {"DDP": parse("ddp=4")}, cluster)  # memory, messages and seconds per GPU
show.moved({"offloaded": plan}, ["T4"])  # bytes on the GPU and on the host, and seconds
show.contexts()  # long texts, on one GPU each or over several
show.large("8B on 8")  # the best layouts of a job that was searched
show.owned()  # the best layout for GPUs that many readers have
show.rungs(), show.savings()  # the ladder of techniques, and what each is worth
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from helpers import kept_layouts
from helpers.kept_layouts import in_words
from helpers.plan import plan, plan_key
from helpers.recipe import Recipe
from helpers.record import Run, measured_steps, read
from helpers.tables import SHOWN, Table, kept, one_change, settings, within
from helpers.tables import epochs as epochs
from tight_fit.checks import each_of_type, of_type
from tight_fit.gpus import GPU, as_gpu
from tight_fit.kernels.step_seconds import lacks
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout
from tight_fit.memory.plan import Plan
from tight_fit.models.step import ModelStep
from tight_fit.plans.own_step import CustomStepPlan
from tight_fit.units import duration, size, span


def before_and_after(before: Run, after: Run, more: dict[str, Run] | None = None) -> Table:
    """The two runs of a lesson, and what a GPU recorded of the same notebook, as one table.

    more  further runs by label, for a table of more than two
    The caption says in a sentence what the change did to memory, accuracy and, on a GPU, time.
    Times are shown only of a GPU: a CPU's depend on what else it does. Rows of a record appear only
    where `results/` has one.

    Raises ValueError where the recipes of before and after differ in more, or less, than one
    field, TypeError for what is no run.
    """
    each_of_type("runs", {"before": before, "after": after, **(more or {})}, Run)
    name, old, new = one_change(before, after)
    rows = [_row(f"before: {name}={old}", before), _row(f"after: {name}={new}", after)]
    rows += [_row(label, run) for label, run in (more or {}).items()]
    notebook = before.name.split("/", 1)[0]
    for label, run in read(notebook).items():
        rows.append(_row(f"recorded on {run.environment['name']}: {label}", run))
    if not any(row["time per step"] for row in rows):
        for row in rows:
            del row["time per step"]
    return Table(rows, _sentence(before, after))


def _row(label: str, run: Run) -> dict[str, str]:
    random = "" if run.recipe.weights == "pretrained" else " (random weights)"
    on_a_gpu = run.environment["device"] == "cuda"
    return {
        "run": label,
        "memory, planned": size(run.planned),
        "memory, measured": size(run.peak),
        "time per step": duration(run.step_seconds) if on_a_gpu else "",
        "accuracy": f"{run.accuracy:.1%}{random}",
    }


def _sentence(before: Run, after: Run) -> str:
    """What changed from the first run to the second, in words and numbers."""
    saved = 1 - after.peak / before.peak
    percent = f"{abs(saved):.0%}"
    memory = f"{percent} {'less' if saved > 0 else 'more'} memory than before"
    if percent == "0%":
        memory = "as much memory as before"
    if before.environment["device"] == "cuda":
        machine = f"the {before.environment['name']}"
        ratio = after.step_seconds / before.step_seconds
        time = f" and {ratio:.2f} times the time per step"
    else:
        machine, time = "this CPU", ""
    points = 100 * (after.accuracy - before.accuracy)
    test = f"{after.test_rows} test examples"
    return (
        f"On {machine}: after takes {memory}{time}. "
        f"Its accuracy on {test} differs by {points:+.1f} points, from one run each."
    )


def plans(named: Mapping[str, Recipe | Plan], gpus: Sequence[str | GPU] = SHOWN) -> Table:
    """A row per recipe: the planned peak of memory, and the planned time of a step on each GPU.

    named  {label: a recipe, which is planned here, or a plan for "cuda" that is made already, also
           of a model of transformers (`plan_model`) or of a step of one's own (`plan_custom_step`)}
    gpus   names of `gpus.GPUS`

    A step that a GPU has measured stands beside its plan (`record.measured_steps`). Behind a time
    stands what multiple it is of the first row's that has one on that GPU. "does not fit" says that
    the GPU has too little memory, "no bf16" that it lacks this arithmetic. Recipes are planned as
    they are: a lesson on the models that readers come for gives `profile="full"`.
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
    caption = f"Planned, not run: a step's memory and time, {used}. {within()}"
    measured = [measured_on(given) for given in named.values()]
    for name in dict.fromkeys(name for found in measured for name in found):
        for row, found in zip(rows, measured):
            row[f"{name}, measured"] = found.get(name, "")
        caption += f" Measured: the same step on a real {name}; a small one waits for its CPU."
    return Table(rows, caption)


def measured_on(recipe: Recipe | Plan) -> dict[str, str]:
    """{GPU: peak and seconds of the step of a recipe} for those that have measured it."""
    if not isinstance(recipe, Recipe):  # a plan may be of a model that was changed further
        return {}
    key = plan_key(recipe)
    return {
        name: f"{size(allocated)}, {span(seconds)}"
        for name, kept, allocated, seconds in measured_steps()
        if plan_key(kept) == key
    }


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


def _planned(named: Mapping[str, Recipe | Plan]) -> dict[str, Plan]:
    each_of_type("named", named, (Recipe, Plan, CustomStepPlan))
    return {
        label: plan(given) if isinstance(given, Recipe) else given for label, given in named.items()
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
    """A row per length of a text and layout: bytes per GPU, and the step's time.

    gpus  8 for Llama 3.1 8B on H100s, with what was published; 2 for Llama 3.2 1B on two RTX 4090
    Nothing is planned here: the table is kept with the package. Raises KeyError for another number
    of GPUs.
    """
    return Table(**kept(f"contexts {gpus}"))


def large(name: str, most: int = 4) -> Table:
    """The best layouts of a step that was searched, the best first, and the published one.

    name  a step of `benchmarks.layout_searches`, such as "8B on 8"
    The last column marks what torchtitan published, with its tokens per second and GPU, if it did.
    Nothing is planned here: the table is kept with the package. Raises KeyError for another name.
    """
    table = kept(name)
    best, others = table["rows"][:most], table["rows"][most:]
    return Table(best + [row for row in others if row.get("published")], table["caption"])


def owned() -> Table:
    """A row per step on GPUs that many readers have: what a search takes, and one GPU beside it.

    Nothing is planned here: the table is kept with the package.
    """
    return Table(**kept("owned"))


def rungs() -> Table:
    """A row per rung: what it changes, the peak, FLOPs, and the smallest GPU that holds it.

    Nothing is planned here: the table is kept with the package (`benchmarks.techniques`).
    """
    return Table(**kept("rungs"))


def savings() -> Table:
    """A row per technique: what it saves alone, on its rung, and taken away from the top.

    Nothing is planned here: the table is kept with the package (`benchmarks.techniques`).
    """
    return Table(**kept("savings"))


def techniques(*fields: str) -> Table:
    """All techniques for one GPU side by side, by plan at full size.

    An arrow marks those that change one of `fields` of the recipe. Nothing is planned here: the
    table is kept with the package (`benchmarks.techniques`).
    """
    table = kept("techniques")
    marked = [
        {"": "→" if any(row["recipe"].startswith(f"{field}=") for field in fields) else ""} | row
        for row in table["rows"]
    ]
    return Table(marked, table["caption"])


def moved(named: Mapping[str, Plan], gpus: Sequence[str | GPU]) -> Table:
    """A row per plan: what it needs on the GPU and on the host, and the step's time on each GPU.

    named  {label: a plan for "cuda"}, each rung below the one it is compared with
    gpus   names of `gpus.GPUS`; "does not fit" stands where the GPU has too little memory

    What moves is timed with data sheets' rates of PCI Express and of the host's memory, which are
    not fitted (`kernels.host_memory`). Raises TypeError for what is no plan.
    """
    each_of_type("named", named, Plan)
    rows, before = [], None
    for label, planned in named.items():
        rows.append(
            {
                "planned": label,
                "on the GPU": size(planned.peak),
                "this rung": "" if before is None else _change(planned.peak - before),
                "on the host": size(planned.host) if planned.host else "nothing",
                **{gpu.name: cell(planned, gpu) for gpu in map(as_gpu, gpus)},
            }
        )
        before = planned.peak
    return Table(
        rows,
        f"Planned, not run, {settings(named.values())}. {within()} "
        "Copies to and from the host are timed by data sheets.",
    )


def _change(difference: int) -> str:
    return f"{'-' if difference < 0 else '+'}{size(abs(difference))}"

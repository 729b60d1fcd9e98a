"""Which strategy for this job on these GPUs? Every candidate is planned; those that fit are ranked.

    choose(Recipe("deberta-large", profile="full", length=512, precision="bf16", batch_size=64),
           Cluster("A100-40GB", per_machine=8, inside="NVLink 3"), goal="time")

What notebook 18 asks for is at the end of this module; its plans are kept (`plan_cache`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from helpers import tables
from helpers.parallel import Parallel
from helpers.recipe import Recipe
from helpers.strategy import plan_cache, step_time
from helpers.strategy.cluster import Candidate, Cluster, name_of, span
from helpers.strategy.plan_ranks import ParallelPlan
from helpers.units import size
from helpers.values import one_of

GOALS = ("time", "memory", "simplest")
Change = dict[str, Any]  # fields of a recipe
CHECKPOINTING: Change = {"checkpointing": True}
EIGHT_BIT: Change = {"optimizer": "adamw8bit"}
ADAPTERS: Change = {"lora_rank": 8}
MOST_MICRO_BATCHES = 8  # of a pipeline: more make its bubble smaller, and planning slower


@dataclass(frozen=True)
class Choice:
    """The candidates for a job on a cluster, ranked.

    candidates  those that fit come first
    left_out    {name of a candidate: why it was not planned}
    """

    job: Recipe
    cluster: Cluster
    goal: str
    candidates: list[Candidate]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The first candidate, None where nothing fits."""
        return self.candidates[0] if self.candidates and self.candidates[0].fit else None

    def candidate(self, name: str) -> Candidate:
        """The candidate of a name. Raises KeyError with the names there are."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        names = ", ".join(candidate.name for candidate in self.candidates)
        raise KeyError(f"No candidate is called {name!r}: there are {names}.")

    def table(self, reasons: bool = False, most: int | None = None) -> tables.Table:
        """A row per candidate, with its reason if asked for; `most` limits the number of rows."""
        rows = [
            {
                "": "→" if candidate is self.best else "" if candidate.fit else "✗",
                "strategy": candidate.name,
                "per GPU": size(candidate.peak),
                "step": span(candidate.time.total),
                "examples/s": f"{candidate.examples_per_second:.0f}",
                "limited by": candidate.limit,
                **({"why": candidate.reason} if reasons else {}),
            }
            for candidate in self.candidates[:most]
        ]
        goal = self.goal if self.goal != "simplest" else "simplicity"
        return tables.Table(
            rows,
            f"Plan: {self.cluster}; what learns the same first, the best by {goal} on top; "
            "✗ does not fit",
        )

    def __str__(self) -> str:
        return str(self.table(reasons=True))


class Attempt(NamedTuple):
    """What may become a candidate: its recipe, its layout, and whether states are offloaded."""

    recipe: Recipe
    parallel: Parallel
    offload: bool = False


def choose(job: Recipe, cluster: Cluster, goal: str = "time") -> Choice:
    """Rank what fits.

    Candidates that learn the same as the job come before those that do not (8-bit states, LoRA).
    Then counts the goal: "time" (seconds per step), "memory" (bytes per GPU) or "simplest" (fewest
    changes). Changes of the recipe are tried only where the job as it is does not fit.

    Where plans are not kept, each candidate takes seconds. A candidate is not planned where
    arithmetic shows that it cannot fit or, for the goal "time", that it cannot be the fastest.
    Raises ValueError for an unknown goal, and for a precision that the GPU lacks.
    """
    one_of("goal", goal, GOALS)
    step_time.rate(cluster.gpu, job.precision)  # or its error
    alone = plan_cache.planned(job)
    candidates: list[Candidate] = []
    left_out: dict[str, str] = {}
    for attempts in (layouts(job, cluster), changes(job, cluster)):
        for recipe, parallel, offload in attempts:
            why: str | None = None
            try:
                if not plan_cache.is_kept(recipe, parallel):
                    why = hopeless(recipe, parallel, cluster, alone, candidates, goal)
                if why is None:
                    cluster.links(parallel)
                    plan = plan_cache.planned(recipe, parallel)
                    candidates.append(Candidate(job, cluster, plan, offload))
            except (ValueError, ModuleNotFoundError) as error:  # no bitsandbytes: no 8-bit states
                why = str(error)
            if why is not None:
                left_out[name_of(job, recipe, parallel, offload)] = why
        if any(candidate.fit for candidate in candidates):
            break
    return Choice(job, cluster, goal, ranked(candidates, goal), left_out)


def ranked(candidates: list[Candidate], goal: str) -> list[Candidate]:
    """Sorted: first what fits, then what learns the same, then by the goal, then by time.

    Those that do not fit are sorted by the bytes that are missing.
    """

    def key(candidate: Candidate) -> tuple:
        values = {
            "time": candidate.time.total,
            "memory": candidate.peak,
            "simplest": candidate.changes,
        }
        return (
            not candidate.fit,
            0 if candidate.fit else candidate.fit.over,
            not candidate.same,
            values[goal],
            candidate.time.total,
        )

    return sorted(candidates, key=key)


def layouts(job: Recipe, cluster: Cluster) -> Iterator[Attempt]:
    """The job as it is on one GPU, then on all GPUs of the cluster.

    All GPUs are used as data ranks with each stage of ZeRO; with as many tensor ranks as a machine
    has GPUs; with as many stages as there are machines (in a single machine: as GPUs, up to 4); and
    with all three axes.
    """
    yield Attempt(job, Parallel())
    gpus, inside = cluster.gpus, cluster.per_machine
    if gpus == 1:
        return
    stages = cluster.machines if cluster.machines > 1 else min(gpus, 4)
    grids = [Parallel(data=gpus, zero_stage=zero_stage) for zero_stage in range(4)]
    if inside > 1:
        grids += _with_zero_1(Parallel(data=gpus // inside, tensor=inside))
    if gpus % stages == 0:
        grids += _with_zero_1(Parallel(data=gpus // stages, pipeline=stages))
    if gpus % (2 * stages) == 0 and inside > 2:
        data = gpus // (2 * stages)
        grids.append(Parallel(data=data, pipeline=stages, tensor=2, zero_stage=int(data > 1)))
    for parallel in dict.fromkeys(grids):
        accumulation = max(job.accumulation, micro_batches(job, parallel))
        yield Attempt(replace(job, accumulation=accumulation), parallel)


def _with_zero_1(parallel: Parallel) -> list[Parallel]:
    """A layout without ZeRO, and with its stage 1 where there is more than one data rank."""
    return [parallel, replace(parallel, zero_stage=1)] if parallel.data > 1 else [parallel]


def micro_batches(job: Recipe, parallel: Parallel) -> int:
    """Micro-batches of a pipeline: as many as divide the examples of a data rank, up to a limit."""
    examples = job.batch_size // parallel.data
    if parallel.pipeline == 1 or not examples:
        return 1
    return max(count for count in range(1, MOST_MICRO_BATCHES + 1) if examples % count == 0)


def changes(job: Recipe, cluster: Cluster) -> Iterator[Attempt]:
    """What to try where nothing fits as it is: the techniques for one GPU, alone and together.

    On several GPUs some of them are tried with DDP and with ZeRO-3 as well.
    """
    accumulations: list[Change] = [
        {"accumulation": count}
        for count in range(job.accumulation + 1, job.batch_size + 1)
        if job.batch_size % count == 0 and (count & (count - 1)) == 0  # powers of two
    ]
    most = accumulations[-1:]  # the most accumulation there is; empty where the batch is 1
    both = [CHECKPOINTING | change for change in most]
    if cluster.gpus == 1:
        same = [*accumulations, CHECKPOINTING]
        same += [CHECKPOINTING | change for change in accumulations[1::2]]
    else:
        yield from _on_all_gpus(job, cluster)
        same = [CHECKPOINTING, *most, *both]
    for change in same:
        yield Attempt(replace(job, **change), Parallel())
    unchanged: Change = {}
    for change in (unchanged, *most, *both):
        yield Attempt(replace(job, **change), Parallel(), offload=True)
    other = [EIGHT_BIT, *(EIGHT_BIT | change for change in most)]
    other += [ADAPTERS, *(ADAPTERS | change for change in both)]
    for change in other:
        yield Attempt(replace(job, **change), Parallel())


def _on_all_gpus(job: Recipe, cluster: Cluster) -> Iterator[Attempt]:
    """Accumulation and checkpointing with the GPUs as data ranks, by DDP and by ZeRO-3."""
    changes: tuple[Change, ...] = (
        {"accumulation": 2},
        CHECKPOINTING,
        CHECKPOINTING | {"accumulation": 4},
    )
    for change in changes:
        for zero_stage in (0, 3):
            if job.batch_size % (cluster.gpus * change.get("accumulation", 1)) == 0:
                parallel = Parallel(data=cluster.gpus, zero_stage=zero_stage)
                yield Attempt(replace(job, **change), parallel)


def hopeless(
    recipe: Recipe,
    parallel: Parallel,
    cluster: Cluster,
    alone: ParallelPlan,
    candidates: list[Candidate],
    goal: str,
) -> str | None:
    """Why a candidate need not be planned; None where it must be.

    alone       the plan of the job on one GPU
    candidates  those planned so far
    The arithmetic holds for every plan: the mean over the ranks is no more than the fullest rank
    has, and all ranks together compute at least as much as one GPU does.
    """
    if recipe.optimizer == "adamw" and recipe.lora_rank is None and recipe.frozen is None:
        parameters = alone.ranks[0].parameters / (parallel.tensor * parallel.pipeline)
        least = _bytes_per_parameter(parallel) * parameters
        if least > cluster.gpu.memory:
            return f"Weights, gradients and states alone are {size(least)} per GPU."
    fastest = min((candidate.time.total for candidate in candidates if candidate.fit), default=None)
    if goal == "time" and fastest is not None:
        speed = step_time.rate(cluster.gpu, recipe.precision)
        bubble = (parallel.pipeline - 1) / recipe.accumulation
        work = sum(alone.ranks[0].flops.values()) / speed / parallel.ranks * (1 + bubble)
        if work > fastest:
            return (
                f"Its work and bubble alone take {span(work)}, "
                f"and another candidate {span(fastest)} in all."
            )
    return None


def _bytes_per_parameter(parallel: Parallel) -> float:
    """Of fp32 weight, gradient and AdamW's two states, per data rank (Rajbhandari et al. 2020)."""
    if parallel.zero_stage == 0:
        return 16
    if parallel.zero_stage == 1:
        return 8 + 8 / parallel.data
    return 16 / parallel.data


LARGE = Recipe("deberta-large", profile="full", length=512, batch_size=16)
# What notebook 18 asks: {name: (job, cluster)}.
SCENARIOS = {
    "one T4": (replace(LARGE, precision="fp16"), Cluster("T4")),
    "two T4s": (replace(LARGE, model="deberta"), Cluster("T4", 2)),
    "two T4s, fp16": (replace(LARGE, model="deberta", precision="fp16"), Cluster("T4", 2)),
    "one machine": (
        replace(LARGE, precision="bf16", batch_size=64),
        Cluster("A100-40GB", 8, inside="NVLink 3"),
    ),
    "slow links": (
        replace(LARGE, precision="bf16", batch_size=128),
        Cluster("A100-40GB", 8, machines=2, inside="NVLink 3", between="Ethernet 10 Gbit"),
    ),
    "fast links": (
        replace(LARGE, precision="bf16", batch_size=128),
        Cluster("A100-40GB", 8, machines=2, inside="NVLink 3", between="InfiniBand 400 Gbit"),
    ),
    "small GPUs": (replace(LARGE, batch_size=4, length=128), Cluster("GTX 1650", 4)),
    "mini": (Recipe("vit", batch_size=32), Cluster("T4", 2)),
    "images": (Recipe("vit", profile="full", batch_size=64), Cluster("T4", 2)),
}
# What notebook 19 lays out over two GPUs.
TWO_T4 = replace(LARGE, precision="fp16", padding="uniform", accumulation=4), Parallel(data=2)
# The values that the panel of notebook 18 offers.
TOGGLES: dict[str, tuple] = {
    "accumulation": (1, 4),
    "precision": ("fp32", "bf16"),
    "checkpointing": (False, True),
    "optimizer": ("adamw", "adamw8bit"),
    "lora_rank": (None, 8),
}


def toggled() -> Iterator[Recipe]:
    """Every recipe that the panel of notebook 18 can ask for, for one GPU."""
    for start in (SCENARIOS["images"][0], LARGE, replace(LARGE, model="deberta")):
        for values in itertools.product(*TOGGLES.values()):
            change: Change = dict(zip(TOGGLES, values))
            yield replace(start, **change)


def plan_everything() -> None:
    """Plan all that notebooks 18 and 19 show of layouts, some ten minutes where nothing is kept."""
    for job, cluster in SCENARIOS.values():
        choose(job, cluster, "memory")
    for recipe in toggled():
        plan_cache.planned(recipe)
    plan_cache.planned(*TWO_T4)

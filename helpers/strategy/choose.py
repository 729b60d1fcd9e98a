"""Which strategy for this job on these cards? Every candidate planned, the ones that fit ranked, each with its reason.

    choose(Recipe("deberta-large", profile="full", length=512, precision="bf16", batch_size=64),
           Cluster("A100-40GB", per_machine=8, inside="NVLink 3"), goal="time")

`python -m helpers.strategy` plans what notebook 18 shows and keeps it (docs/choices.json).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from helpers import tables
from helpers.parallel import Parallel
from helpers.recipe import Recipe
from helpers.strategy import plan_cache, step_time
from helpers.strategy.cluster import Candidate, Cluster, span
from helpers.strategy.plan_ranks import ParallelPlan
from helpers.units import size

GOALS = ("time", "memory", "simplest")
MICRO = 8  # micro-batches of a pipeline at most: more make the bubble smaller, and a plan slower


@dataclass(frozen=True)
class Choice:
    """rows: ranked, what fits first; left_out: {candidate: why it was not planned}."""

    job: Recipe
    cluster: Cluster
    goal: str
    candidates: list[Candidate]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The first row, None where nothing fits."""
        return self.candidates[0] if self.candidates and self.candidates[0].fit else None

    def candidate(self, name: str) -> Candidate:
        """Raises KeyError naming the rows there are."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise KeyError(
            f"No row is called {name!r}: there are {', '.join(candidate.name for candidate in self.candidates)}."
        )

    def table(self, reasons: bool = False, most: int | None = None) -> tables.Table:
        told = [
            {
                "": "→" if candidate is self.best else "" if candidate.fit else "✗",
                "strategy": candidate.name,
                "a card": size(candidate.peak),
                "step": span(candidate.time.total),
                "rows/s": f"{candidate.rows_per_second:.0f}",
                "limited by": candidate.limit,
                **({"why": candidate.reason} if reasons else {}),
            }
            for candidate in self.candidates[:most]
        ]
        return tables.Table(
            told,
            f"Plan: {self.cluster}; what learns the same first, the best by "
            f"{self.goal if self.goal != 'simplest' else 'simplicity'} on top; ✗ does not fit",
        )

    def __str__(self) -> str:
        return str(self.table(reasons=True))


def choose(job: Recipe, cluster: Cluster, goal: str = "time") -> Choice:
    """Rank what fits. What learns the same as the job comes before what does not (8-bit states, LoRA), then the goal:
    "time" (seconds a step), "memory" (bytes a card) or "simplest" (fewest changes). Changes of the recipe are tried
    where the job as it is does not fit.

    Without kept plans it takes seconds a candidate; a candidate is then not planned where arithmetic shows that it cannot
    fit, or for goal "time" that it cannot win. Raises ValueError for an unknown goal, or a precision the card lacks.
    """
    if goal not in GOALS:
        raise ValueError(f"goal={goal!r} is not known: use one of {', '.join(GOALS)}.")
    step_time.rate(cluster.gpu, job.precision)  # or its error
    candidates: list[Candidate] = []
    left_out: dict[str, str] = {}
    alone = plan_cache.planned(job)
    for stage in (layouts(job, cluster), changes(job, cluster)):
        for recipe, parallel, offload in stage:
            candidate = Candidate(job, cluster, ParallelPlan(recipe, parallel, "cuda", ()), offload)
            try:
                why = (
                    None
                    if plan_cache.is_kept(recipe, parallel)
                    else hopeless(recipe, parallel, cluster, alone, candidates, goal)
                )
                if why is None:
                    cluster.links(parallel)
                    candidates.append(replace(candidate, plan=plan_cache.planned(recipe, parallel)))
                else:
                    left_out[candidate.name] = why
            except (ValueError, ModuleNotFoundError) as error:  # no bitsandbytes: no 8-bit states
                left_out[candidate.name] = str(error)
        if any(candidate.fit for candidate in candidates):
            break
    keys = {
        "time": lambda candidate: candidate.time.total,
        "memory": lambda candidate: candidate.peak,
        "simplest": lambda candidate: candidate.changes,
    }
    order = sorted(
        candidates,
        key=lambda candidate: (
            not candidate.fit,
            0 if candidate.fit else candidate.fit.over,
            not candidate.same,
            keys[goal](candidate),
            candidate.time.total,
        ),
    )
    return Choice(job, cluster, goal, order, left_out)


def layouts(job: Recipe, cluster: Cluster) -> Iterator[tuple[Recipe, Parallel, bool]]:
    """One card, then the ways to use all: data ranks with each stage of ZeRO, tensor ranks as many as a machine has, stages
    as many as machines (or cards, up to 4), and all three."""
    yield job, Parallel(), False
    n, inside = cluster.gpus, cluster.per_machine
    if n == 1:
        return
    stages = cluster.machines if cluster.machines > 1 else min(n, 4)
    grids = [Parallel(data=n, zero_stage=shard) for shard in range(4)]
    grids += [
        Parallel(data=n // inside, tensor=inside, zero_stage=shard)
        for shard in (0, 1)[: 1 + (n > inside)]
        if inside > 1
    ]
    grids += [
        Parallel(data=n // stages, pipeline=stages, zero_stage=shard)
        for shard in (0, 1)[: 1 + (n > stages)]
        if n % stages == 0
    ]
    if n % (2 * stages) == 0 and inside > 2:
        grids.append(
            Parallel(
                data=n // (2 * stages), pipeline=stages, tensor=2, zero_stage=int(n > 2 * stages)
            )
        )
    for parallel in dict.fromkeys(grids):
        yield (
            replace(job, accumulation=max(job.accumulation, micro(job, parallel))),
            parallel,
            False,
        )


def micro(job: Recipe, parallel: Parallel) -> int:
    """Micro-batches for a pipeline's stages: as many as divide a data rank's rows, up to MICRO."""
    candidates = job.batch_size // parallel.data
    return (
        max((m for m in range(1, MICRO + 1) if candidates and candidates % m == 0), default=1)
        if parallel.pipeline > 1
        else 1
    )


def changes(job: Recipe, cluster: Cluster) -> Iterator[tuple[Recipe, Parallel, bool]]:
    """What to try where nothing fits as it is: one card's techniques, alone and together, and the layouts with them."""
    parts = [
        a
        for a in range(job.accumulation + 1, job.batch_size + 1)
        if job.batch_size % a == 0 and (a & (a - 1) == 0)
    ]
    again, small, adapters = {"checkpointing": True}, {"optimizer": "adamw8bit"}, {"lora_rank": 8}
    most = [{"accumulation": parts[-1]}] if parts else []
    alone = (
        [{"accumulation": a} for a in parts]
        + [again]
        + [again | {"accumulation": a} for a in parts[1::2]]
    )
    if cluster.gpus > 1:
        few = [{"accumulation": 2}, again, again | {"accumulation": 4}]
        for change in few:
            for parallel in (
                Parallel(data=cluster.gpus),
                Parallel(data=cluster.gpus, zero_stage=3),
            ):
                if job.batch_size % (cluster.gpus * change.get("accumulation", 1)) == 0:
                    yield replace(job, **change), parallel, False
        alone = [again, *most, *(again | change for change in most)]
    for change in alone:
        yield replace(job, **change), Parallel(), False
    for change in ({}, *most, *(again | change for change in most)):
        yield replace(job, **change), Parallel(), True
    for change in (
        small,
        *(small | change for change in most),
        adapters,
        *(adapters | again | change for change in most),
    ):
        yield replace(job, **change), Parallel(), False


def hopeless(
    recipe: Recipe,
    parallel: Parallel,
    cluster: Cluster,
    alone: ParallelPlan,
    candidates: list[Candidate],
    goal: str,
) -> str | None:
    """Why a candidate need not be planned, by arithmetic that holds for every plan: a mean over the ranks is no more than
    the fullest one, and all ranks together compute at least what one card does."""
    if recipe.optimizer == "adamw" and recipe.lora_rank is None and recipe.frozen is None:
        kept = (
            16 if parallel.zero_stage in (0, 1) else 16 / parallel.data
        )  # bytes a parameter: weight, gradient, two states
        kept -= 8 * (1 - 1 / parallel.data) if parallel.zero_stage == 1 else 0
        least = kept * alone.ranks[0].parameters / (parallel.tensor * parallel.pipeline)
        if least > cluster.gpu.memory:
            return f"Weights, gradients and states alone are {size(least)} a card."
    fastest = min((candidate.time.total for candidate in candidates if candidate.fit), default=None)
    if goal == "time" and fastest is not None:
        bubble = (parallel.pipeline - 1) / recipe.accumulation
        work = (
            sum(alone.ranks[0].flops.values())
            / step_time.rate(cluster.gpu, recipe.precision)
            / parallel.ranks
            * (1 + bubble)
        )
        if work > fastest:
            return f"Its work and bubble alone take {span(work)}, and another candidate {span(fastest)} in all."
    return None


LARGE = Recipe("deberta-large", profile="full", length=512, batch_size=16)
# What notebook 18 asks: {name: (job, machines)}.
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
    "small cards": (replace(LARGE, batch_size=4, length=128), Cluster("GTX 1650", 4)),
    "mini": (Recipe("vit", batch_size=32), Cluster("T4", 2)),
    "pictures": (Recipe("vit", profile="full", batch_size=64), Cluster("T4", 2)),
}
# What notebook 19 lays over two cards.
TWO_T4 = replace(LARGE, precision="fp16", padding="uniform", accumulation=4), Parallel(data=2)
TOGGLES = {
    "accumulation": (1, 4),
    "precision": ("fp32", "bf16"),
    "checkpointing": (False, True),
    "optimizer": ("adamw", "adamw8bit"),
    "lora_rank": (None, 8),
}  # of the panel


def toggled() -> Iterator[Recipe]:
    """Every recipe that the panel of notebook 18 can ask for, for one card."""
    for start in (SCENARIOS["pictures"][0], LARGE, replace(LARGE, model="deberta")):
        for values in itertools.product(*TOGGLES.values()):
            yield replace(start, **dict(zip(TOGGLES, values)))


def main() -> None:
    """Plan all of it anew, some ten minutes, and keep it."""
    plan_cache.forget()
    for job, cluster in SCENARIOS.values():
        choose(job, cluster, "memory")
    for recipe in toggled():
        plan_cache.planned(recipe)
    plan_cache.planned(*TWO_T4)
    plan_cache.write()


if __name__ == "__main__":
    main()

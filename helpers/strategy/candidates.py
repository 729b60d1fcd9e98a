"""What `choose` tries: layouts and changes of a job, and which of them need no plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from helpers.parallel import Parallel
from helpers.recipe import Recipe
from helpers.strategy.candidate import Candidate
from helpers.strategy.plan_ranks import ParallelPlan
from tight_fit.gpus.specs import find_gpu
from tight_fit.layouts.cluster import Cluster
from tight_fit.units import size, span

Change = dict[str, Any]  # fields of a recipe
CHECKPOINTING: Change = {"checkpointing": True}
EIGHT_BIT: Change = {"optimizer": "adamw8bit"}
ADAPTERS: Change = {"lora_rank": 8}
# With these fields weights, gradients and states take 16 bytes per parameter.
PLAIN: Change = {
    "optimizer": "adamw",
    "lora_rank": None,
    "frozen": None,
    "base": "fp32",
    "offload": None,
    "optimizer_in_backward": False,
}
MOST_MICRO_BATCHES = 8  # of a pipeline: more make its bubble smaller, and planning slower


class Attempt(NamedTuple):
    """What may become a candidate: what it changes of the job, its layout, and whether the states
    are offloaded."""

    change: Change
    parallel: Parallel
    offload: bool = False


def layouts(job: Recipe, cluster: Cluster, goal: str = "time") -> Iterator[Attempt]:
    """The job as it is on one GPU, then on all GPUs of the cluster.

    All GPUs are used as data ranks with each stage of ZeRO; with as many tensor ranks as a machine
    has GPUs; with as many stages as there are machines (in a single machine: as GPUs, up to 4); and
    with all three axes.
    """
    yield Attempt({}, Parallel())
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
        for accumulation in accumulations(job, parallel, goal):
            yield Attempt({"accumulation": accumulation}, parallel)


def _with_zero_1(parallel: Parallel) -> list[Parallel]:
    """A layout without ZeRO, and with its stage 1 where there is more than one data rank."""
    return [parallel, replace(parallel, zero_stage=1)] if parallel.data > 1 else [parallel]


def accumulations(job: Recipe, parallel: Parallel, goal: str = "time") -> list[int]:
    """Numbers of micro-batches to try with a layout, ascending; the job's own where none divides.

    They are the job's own times powers of two, as long as they divide the examples of a data rank.
    Of a pipeline there are two: as many as it has stages, and `MOST_MICRO_BATCHES`, or the nearest
    that divide. For the goal "memory" a GPU has no more examples at once than with data ranks
    alone, so that layouts are compared fairly.
    """
    examples = job.batch_size // parallel.data
    numbers = [job.accumulation << power for power in range(job.batch_size.bit_length())]
    numbers = [number for number in numbers if number <= examples and examples % number == 0]
    if parallel.pipeline > 1:
        numbers = [number for number in numbers if number <= MOST_MICRO_BATCHES] or numbers[:1]
        numbers = [number for number in numbers if number >= parallel.pipeline] or numbers[-1:]
        numbers = sorted({*numbers[:1], *numbers[-1:]})
    if goal == "memory":
        others = parallel.tensor * parallel.pipeline
        numbers = [number for number in numbers if number >= others] or numbers[-1:]
    return numbers or [job.accumulation]


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
        yield Attempt(change, Parallel())
    unchanged: Change = {}
    for change in (unchanged, *most, *both):
        yield Attempt(change, Parallel(), offload=True)
    other = [EIGHT_BIT, *(EIGHT_BIT | change for change in most)]
    other += [ADAPTERS, *(ADAPTERS | change for change in both)]
    for change in other:
        yield Attempt(change, Parallel())


def _on_all_gpus(job: Recipe, cluster: Cluster) -> Iterator[Attempt]:
    """Checkpointing with the GPUs as data ranks, by DDP and by ZeRO-3."""
    changes: tuple[Change, ...] = (CHECKPOINTING, CHECKPOINTING | {"accumulation": 4})
    for change in changes:
        for zero_stage in (0, 3):
            if job.batch_size % (cluster.gpus * change.get("accumulation", 1)) == 0:
                parallel = Parallel(data=cluster.gpus, zero_stage=zero_stage)
                yield Attempt(change, parallel)


def hopeless(
    recipe: Recipe,
    parallel: Parallel,
    cluster: Cluster,
    alone: ParallelPlan,
    candidates: list[Candidate],
    goal: str,
    offload: bool = False,
) -> str | None:
    """Why a candidate need not be planned; None where it must be.

    alone       the plan of the job on one GPU
    candidates  those planned so far
    offload     whether the optimizer's states lie in the memory of the machine
    The arithmetic holds for every plan: the mean over the ranks is no more than the fullest rank
    has, all ranks together compute at least as much as one GPU does, and no GPU is faster than its
    peak.
    """
    if not offload and all(getattr(recipe, name) == value for name, value in PLAIN.items()):
        parameters = alone.ranks[0].parameters / (parallel.tensor * parallel.pipeline)
        least = _bytes_per_parameter(parallel) * parameters
        if least > cluster.gpu.memory:
            return f"Weights, gradients and states alone are {size(least)} per GPU."
    fastest = min((candidate.time.total for candidate in candidates if candidate.fit), default=None)
    same_work = recipe.lora_rank == alone.recipe.lora_rank
    if goal == "time" and fastest is not None and same_work:
        speed = find_gpu(cluster.gpu).peak(recipe.precision)
        bubble = (parallel.pipeline - 1) / recipe.accumulation
        work = sum(alone.ranks[0].flops.values()) / speed / parallel.ranks * (1 + bubble)
        if work > fastest:
            return (
                f"At the GPUs' peak its work and bubble alone take {span(work)}, "
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

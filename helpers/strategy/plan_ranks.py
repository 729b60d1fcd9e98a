"""The planner for many ranks: any rank of any layout, on a laptop.

Each rank's step is run as it would be there, by torch's own engines, on tensors without values and over a process group
that sends nothing (torch's "fake" backend). It gives the bytes a rank holds and what it sends, for two ranks or 1,024.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

from helpers import models
from helpers.gpus import GPU, NCCL
from helpers.memory.timeline import Fit, Plan, to_plan
from helpers.memory.tracker import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    StorageTrace,
    Tracker,
    steady_memory,
)
from helpers.optimizers import states
from helpers.parallel.comm_meter import CommMeter, SentMessage
from helpers.parallel.layout import Parallel
from helpers.parallel.rank import AXES, Rank, grid
from helpers.plan.cuda_kernels import CudaKernels
from helpers.plan.fake_tensors import FakeValues, Indices, NeverSkipScaler
from helpers.plan.planner import check_target, fake_batch, plan_key
from helpers.recipe import Recipe
from helpers.strategy import step_time
from helpers.torch_private import (
    FakeTensorMode,
    fake_store,
    forget_process_groups,
    fsdp_param_module,
)
from helpers.units import GIB


@dataclass(frozen=True)
class RankPlan(Plan):
    """A `Plan` of one rank's step. `sent` lists what it sends in a step, in no order that means anything."""

    rank: int = 0
    sent: tuple[SentMessage, ...] = ()


@dataclass(frozen=True)
class ParallelPlan:
    """A step laid over ranks. `ranks` holds a `RankPlan` for each stage of the pipeline: of its first data and tensor
    rank, which none of the others exceeds by more than an uneven share."""

    recipe: Recipe
    parallel: Parallel
    target: str
    ranks: tuple[RankPlan, ...]

    @property
    def fullest(self) -> RankPlan:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def peak(self) -> int:
        """Bytes of tensors at the peak of the fullest rank."""
        return self.fullest.peak

    @property
    def at_peak(self) -> dict[str, int]:
        return self.fullest.at_peak

    @property
    def bytes_by_collective(self) -> dict[str, int]:
        """Bytes that a rank sends in a step, by collective; of the pipeline the stage that sends most."""
        return max(
            (bytes_by_collective(rank.sent) for rank in self.ranks),
            key=lambda sent: sum(sent.values()),
        )

    def fits(self, gpu: str | GPU) -> Fit:
        """Whether the fullest rank fits a card; see `Plan.fits`. With more than one rank NCCL's buffers are a term."""
        found = self.fullest.fits(gpu)
        return (
            replace(found, terms=found.terms | {"NCCL buffers": NCCL})
            if self.parallel.ranks > 1
            else found
        )

    def seconds(self, gpu: str | GPU, links) -> step_time.StepTime:
        """The step's time by the model of cards and links in `cost`; see `cost.step`."""
        return step_time.step(self, gpu, links)

    def __str__(self) -> str:
        sent = (
            ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.bytes_by_collective.items())
            or "nothing"
        )
        return f"{self.parallel}: {self.fullest}; sent a step and rank, GiB: {sent}"


def bytes_by_collective(sent: tuple[SentMessage, ...]) -> dict[str, int]:
    """Bytes sent by collective."""
    total: dict[str, int] = {}
    for message in sent:
        total[message.kind] = total.get(message.kind, 0) + message.bytes
    return total


def plan_parallel(recipe: Recipe, parallel: Parallel, target: str = "cuda") -> ParallelPlan:
    """Plan one step of `recipe` laid over ranks. Raises ValueError where they do not go together, RuntimeError when this
    process is a rank itself (it has a process group already: plan in another process)."""
    ranks = tuple(
        replace(
            plan_rank(plan_key(recipe), parallel, stage * parallel.data * parallel.tensor, target),
            recipe=recipe,
        )
        for stage in range(parallel.pipeline)
    )
    return ParallelPlan(recipe, parallel, target, ranks)


@lru_cache(maxsize=256)
def plan_rank(recipe: Recipe, parallel: Parallel, rank: int, target: str = "cuda") -> RankPlan:
    """Plan the step of one rank, counted from 0 over pipeline, data, tensor (the last runs fastest). Raises ValueError for
    another target than "cuda" and "cpu", and for a rank that the layout does not have."""
    check_target(target)
    parallel.local(recipe)
    if not 0 <= rank < parallel.ranks:
        raise ValueError(
            f"rank={rank} is not one of the {parallel.ranks} of {parallel}: count from 0."
        )

    def kernels():
        return CudaKernels(recipe, active=target == "cuda")

    with fake_ranks(parallel.ranks, rank):
        mesh = grid(parallel)
        with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), kernels():
            model = models.empty(recipe, recompute=kernels)
            shapes = SimpleNamespace(config=model.config)
            count = sum(parameter.numel() for parameter in model.parameters())
            with Indices(), patch.object(fsdp_param_module(), "_chunk_with_empty", Chunks):
                one = Rank(
                    recipe,
                    parallel,
                    model,
                    mesh,
                    NeverSkipScaler("cpu", enabled=recipe.precision == "fp16"),
                )
            del model
            storage_trace, sent = trace_rank(one, lambda: fake_batch(shapes, one.local))
            del one
    base = to_plan((storage_trace, count), recipe, target)
    return RankPlan(**vars(base) | {"rank": rank, "sent": sent})


def trace_rank(rank: Rank, make_batch) -> tuple[StorageTrace, tuple[SentMessage, ...]]:
    """(story, what was sent) of one step of a rank, real or without values; of more micro-batches than two the second
    stands for those between."""
    accumulation = rank.local.accumulation
    count = min(accumulation, 2) if rank.parallel.pipeline == 1 else accumulation
    rank.settle(make_batch)
    tracker = Tracker()
    axes = {rank.mesh[axis].get_group().group_name: axis for axis in AXES}
    meter = CommMeter(axes)
    ends: list[
        int
    ] = []  # how much had been sent when each micro-batch was asked for, but the first

    def phase(name: str) -> None:
        tracker.phase(name)
        meter.phase = name

    def batches():
        for number in range(count):
            ends.extend([len(meter.sent)] if number else [])
            with tracker.looking_away():
                batch = make_batch()
            phase("forward")
            tracker.adopt(batch, ACTIVATIONS)
            yield batch
            del batch

    with steady_memory(), tracker, meter:
        tracker.adopt([list(rank.module.parameters()), list(rank.module.buffers())], PARAMETERS)
        tracker.adopt(
            states(getattr(rank.optimizer, "optim", rank.optimizer), rank.scaler), OPTIMIZER
        )  # ZeroRedundancyOptimizer's own
        tracker.adopt(
            [parameter.grad for parameter in rank.module.parameters()], GRADIENTS
        )  # views of DDP's buckets
        tracker.storage_trace.begin = len(tracker.storage_trace.events)
        tracker.watch_gradients(rank.module)
        rank.step(batches(), phase, count)
    for name in tracker.storage_trace.flops:
        tracker.storage_trace.flops[name] = (
            tracker.storage_trace.flops[name] * accumulation // count
        )
    repeated = tuple(meter.sent[: ends[0]]) * (accumulation - count) if accumulation > count else ()
    return tracker.storage_trace, repeated + tuple(meter.sent)


@contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """As if this process were one rank of many: torch's process group that sends nothing. Raises RuntimeError where
    there is a process group already."""

    if dist.is_initialized():
        raise RuntimeError(
            "This process is a rank already: plan in a process that has no process group."
        )
    hook = sys.excepthook  # torch puts the rank before every error from then on
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        forget_process_groups()


class Chunks:
    """`torch.chunk`, one chunk at a time and empty ones behind the last: FSDP2 asks for two, and making all of them
    takes minutes for 1,024 ranks."""

    def __init__(self, tensor: torch.Tensor, chunks: int, dim: int):
        self.tensor, self.dim, self.size = tensor, dim, -(-tensor.size(dim) // chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = index * self.size
        length = min(self.size, self.tensor.size(self.dim) - begin)
        return (
            self.tensor.narrow(self.dim, begin, length) if length > 0 else self.tensor.new_empty(0)
        )

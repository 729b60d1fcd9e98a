"""The planner for many ranks: any rank of any layout, on a laptop.

The step of a rank runs as it would on that rank, by torch's own engines (DDP, FSDP2, DTensor), on
tensors without values and over a process group that sends nothing (torch's "fake" backend). The
plan says what the rank holds and what it sends, in bytes, for two ranks as for 1,024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from helpers import models
from helpers.parallel.layout import Parallel
from helpers.parallel.rank import AXES, Rank, grid
from helpers.plan.planner import check_device, fake_batch, plan_key
from helpers.recipe import Recipe
from helpers.strategy.plan_summary import PlanSummary, peak_without_states
from tight_fit.gpus import GPU, NCCL
from tight_fit.kernels.trace_ops import Recorder
from tight_fit.layouts import seconds as step_time
from tight_fit.layouts.fake_rank import Chunks, fake_ranks
from tight_fit.layouts.messages import CommMeter, SentMessage, place_messages
from tight_fit.layouts.seconds import Link
from tight_fit.layouts.torch_private_ranks import fsdp_param_module
from tight_fit.memory.plan import Fit, Plan, to_plan
from tight_fit.techniques.optimizers import states
from tight_fit.techniques.step import Batch
from tight_fit.torch_private import FakeTensorMode
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_tensors import FakeValues, Indices, NeverSkipScaler
from tight_fit.trace.tracker import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    StorageTrace,
    Tracker,
    steady_memory,
)
from tight_fit.units import GIB


@dataclass(frozen=True, eq=False)
class RankPlan(Plan):
    """A `Plan` of the step of one rank.

    rank  its number, see `plan_rank`
    sent  the messages that it sends per optimizer step, in the order in which they are sent
    """

    rank: int = 0
    sent: tuple[SentMessage, ...] = ()

    @property
    def without_states(self) -> int:
        """Bytes at the peak if the optimizer's states were in another memory."""
        return peak_without_states(self)

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return self.highest["gradients"]


@dataclass(frozen=True)
class ParallelPlan:
    """The plan of a step that is laid out over ranks.

    device  "cuda" or "cpu"
    ranks   for each stage of the pipeline the plan of its first data and tensor rank. The other
            ranks of the stage need at most as much, but for the rest of an uneven division.
    """

    recipe: Recipe
    parallel: Parallel
    device: str
    ranks: tuple[RankPlan, ...] | tuple[PlanSummary, ...]

    @property
    def fullest(self) -> RankPlan | PlanSummary:
        """The rank with the highest peak."""
        ranks: Sequence[RankPlan | PlanSummary] = self.ranks
        return max(ranks, key=lambda rank: rank.peak)

    @property
    def peak(self) -> int:
        """Bytes of tensors at the peak of the fullest rank."""
        return self.fullest.peak

    @property
    def at_peak(self) -> dict[str, int]:
        """{category: bytes} at the peak of the fullest rank."""
        return self.fullest.at_peak

    @property
    def bytes_by_collective(self) -> dict[str, int]:
        """{collective: bytes sent per optimizer step} of the rank that sends most."""
        return max(
            (bytes_by_collective(rank.sent) for rank in self.ranks),
            key=lambda sent: sum(sent.values()),
        )

    def fits(self, gpu: str | GPU) -> Fit:
        """Whether the fullest rank fits a GPU, as `Plan.fits`; several ranks need buffers for NCCL.

        Raises ValueError for an unknown GPU.
        """
        fit = self.fullest.fits(gpu)
        if self.parallel.ranks == 1:
            return fit
        return replace(fit, terms=fit.terms | {"NCCL buffers": NCCL})

    def seconds(
        self, gpu: str | GPU, links: Link | str | Mapping[str, Link | str]
    ) -> step_time.StepTime:
        """The time of the step by `layouts.seconds.step`, which explains the arguments."""
        return step_time.step(self, gpu, links)

    def __str__(self) -> str:
        sent = ", ".join(
            f"{name} {size / GIB:.2f}" for name, size in self.bytes_by_collective.items()
        )
        return f"{self.parallel}: {self.fullest}; sent per step and rank, GiB: {sent or 'nothing'}"


def bytes_by_collective(sent: Iterable[SentMessage]) -> dict[str, int]:
    """{collective: bytes sent}."""
    total: dict[str, int] = {}
    for message in sent:
        total[message.kind] = total.get(message.kind, 0) + message.bytes
    return total


def plan_parallel(recipe: Recipe, parallel: Parallel, device: str = "cuda") -> ParallelPlan:
    """Plan one optimizer step of `recipe` laid out over ranks, for "cuda" or "cpu".

    Raises ValueError where recipe and layout do not go together, and RuntimeError where this
    process has a process group already: plan in another process then.
    """
    return ParallelPlan(recipe, parallel, device, plan_stages(recipe, parallel, device))


def plan_stages(recipe: Recipe, parallel: Parallel, device: str = "cuda") -> tuple[RankPlan, ...]:
    """The plans of the first data and tensor rank of each stage; see `plan_parallel`."""
    key, ranks_per_stage = plan_key(recipe), parallel.data * parallel.tensor
    return tuple(
        replace(plan_rank(key, parallel, stage * ranks_per_stage, device), recipe=recipe)
        for stage in range(parallel.pipeline)
    )


@lru_cache(maxsize=256)
def plan_rank(recipe: Recipe, parallel: Parallel, rank: int, device: str = "cuda") -> RankPlan:
    """Plan the step of one rank.

    rank  from 0, counted over the grid pipeline × data × tensor; the tensor index changes fastest
    Raises ValueError for another device than "cuda" and "cpu", for a rank that the layout does not
    have, and where recipe and layout do not go together.
    """
    check_device(device)
    local = parallel.local(recipe)
    if not 0 <= rank < parallel.ranks:
        raise ValueError(
            f"rank={rank} is not one of the {parallel.ranks} of {parallel}: count from 0."
        )

    def kernels() -> CudaKernels:
        return CudaKernels(recipe, active=device == "cuda")

    with fake_ranks(parallel.ranks, rank):
        mesh = grid(parallel)  # its tensors have values: before FakeTensorMode
        with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), kernels():
            fake_rank, shape, parameters = _fake_rank(recipe, parallel, mesh, kernels)
            recorder = Recorder() if device == "cuda" else None
            storage_trace, sent = trace_rank(fake_rank, lambda: fake_batch(shape, local), recorder)
            del fake_rank  # its tensors belong to the process group that ends here
    base = to_plan((storage_trace, parameters), recipe, device)
    return RankPlan(
        **{field.name: getattr(base, field.name) for field in fields(Plan)}, rank=rank, sent=sent
    )


class ModelShape(nn.Module):
    """A model without layers: `fake_batch` asks a model for its configuration only."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.config: Any = config


def _fake_rank(
    recipe: Recipe,
    parallel: Parallel,
    mesh: dict[str, DeviceMesh],
    kernels: Callable[[], CudaKernels],
) -> tuple[Rank, ModelShape, int]:
    """(this process's rank without values, what a batch depends on, number of parameters).

    Nothing but the rank holds the model afterwards, so that what the rank gives up is freed.
    """
    model = models.empty(recipe, recompute=kernels)
    shape = ModelShape(model.config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    scaler = NeverSkipScaler("cpu", enabled=recipe.precision == "fp16")
    # As in `fake_rank`: of 1,024 chunks of each parameter only those are made that are asked for.
    with Indices(), patch.object(fsdp_param_module(), "_chunk_with_empty", Chunks):
        return Rank(recipe, parallel, model, mesh, scaler), shape, parameters


def trace_rank(
    rank: Rank, make_batch: Callable[[], Batch], recorder: Recorder | None = None
) -> tuple[StorageTrace, tuple[SentMessage, ...]]:
    """(trace of one optimizer step of a rank, the messages it sends), with real or fake tensors.

    make_batch  gives one micro-batch of this rank
    recorder    is told of the step's operations; the trace then holds them, with the messages at
                their places
    Of more than two micro-batches two are run, unless in a pipeline: the others repeat the first in
    what they send, and FLOPs and messages are counted as often as they would occur.
    """
    accumulation = rank.local.accumulation
    count = min(accumulation, 2) if rank.parallel.pipeline == 1 else accumulation
    rank.settle(make_batch)
    tracker = Tracker(recorder)
    order = recorder.traced.order if recorder else []
    sent_at: list[int] = []  # the place in `order` of each message
    begins: list[int] = []  # the place in `order` of each call of `phase`
    meter = CommMeter(
        {rank.mesh[axis].get_group().group_name: axis for axis in AXES},
        told=lambda: sent_at.append(len(order)),
    )
    sent_before: list[int] = []  # number of messages sent before each micro-batch but the first
    batch_at: list[int] = []  # the place in `order` of each micro-batch

    def phase(name: str) -> None:
        tracker.phase(name)
        meter.phase = name
        begins.append(len(order))

    def batches() -> Iterator[Batch]:
        for number in range(count):
            if number:
                sent_before.append(len(meter.sent))
            with tracker.paused():
                batch = make_batch()
            phase("forward")
            batch_at.append(len(order))
            tracker.adopt(batch, ACTIVATIONS)
            yield batch
            del batch

    with steady_memory(), tracker, meter:
        _adopt(tracker, rank)
        tracker.watch_gradients(rank.module)
        rank.step(batches(), phase, count)
    storage_trace = tracker.storage_trace
    for name in storage_trace.flops:
        storage_trace.flops[name] = storage_trace.flops[name] * accumulation // count
    skipped = accumulation - count
    repeated = meter.sent[: sent_before[0]] * skipped if skipped else []
    if recorder is not None:
        traced = recorder.traced
        place_messages(traced, sent_at, meter.sent)
        traced.tf32 = rank.recipe.precision == "tf32"
        if rank.parallel.pipeline > 1:
            traced.passes = tuple(sorted(set(begins[:-1])))
        elif skipped:  # the first sends nothing with DDP, the last adds to gradients without it
            first = (batch_at[0], batch_at[1])
            traced.repeat(*(first if rank.ddp else (batch_at[1], begins[-1])), skipped)
        storage_trace.operations = traced
    return storage_trace, tuple(repeated + meter.sent)


def _adopt(tracker: Tracker, rank: Rank) -> None:
    """Tell the tracker of what exists before the step; its trace begins after that."""
    parameters = list(rank.module.parameters())
    tracker.adopt([parameters, list(rank.module.buffers())], PARAMETERS)
    # ZeroRedundancyOptimizer keeps its states in an optimizer of its own, `optim`.
    tracker.adopt(states(getattr(rank.optimizer, "optim", rank.optimizer), rank.scaler), OPTIMIZER)
    # Gradients that exist already are views of DDP's buckets.
    tracker.adopt([parameter.grad for parameter in parameters], GRADIENTS)
    tracker.storage_trace.begin = len(tracker.storage_trace.events)

"""The planner for any Hugging Face model on any layout: what a rank holds, sends and takes.

The step of a rank runs as it would on that rank, by torch's own engines, on tensors without values
and over a process group that sends nothing. Layers that repeat are traced once (`RepeatedLayers`),
so that 8 and 70 billion parameters take seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from transformers import PretrainedConfig

from tight_fit.checks import of_type, one_of, true_or_false
from tight_fit.gpus import GPU, NCCL, cublas_workspace, find
from tight_fit.kernels.trace_ops import Recorder
from tight_fit.layouts import seconds as step_time
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.fake_rank import refuse_a_rank
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.open_ranks import OpenRanks
from tight_fit.layouts.rank import local_step
from tight_fit.layouts.schedules import schedule_of
from tight_fit.layouts.seconds import Link
from tight_fit.layouts.trace import streams_of, trace_model_rank
from tight_fit.layouts.trace_pipeline import trace_stage
from tight_fit.layouts.wrapping import layers, prefetch
from tight_fit.memory.allocator import AllocatorPeaks, replay
from tight_fit.memory.plan import Fit, Plan, check_device, to_plan
from tight_fit.models import config as hf_config
from tight_fit.models.config import CannotPlan
from tight_fit.models.made import FlatLogits
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import as_cannot_plan, batch
from tight_fit.techniques.model_changes import as_if_real
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_tensors import FakeValues
from tight_fit.trace.repeated_layers import RepeatedLayers
from tight_fit.trace.splice import NotAlike
from tight_fit.trace.storage_trace import StorageTrace


@dataclass(frozen=True, eq=False)
class LayoutPlan(Plan):
    """A `Plan` of the step of one rank of a layout; all ranks of it need as much, or a little less.

    layout     how the step is laid over ranks
    streams    int8 [storages], index into `layouts.trace.STREAMS` of the stream on which each is
               allocated
    selective  whether only some activations are recomputed
    reduce     dtype in which FSDP2 sums gradients
    sent       the messages that the rank sends per optimizer step, in the order of sending
    stage      the rank along the pipeline, from 0
    stages     in a pipeline, whose ranks need unlike much, the plans of all of them by their rank;
               this plan is that of the rank that needs most
    """

    layout: Layout = Layout()
    streams: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int8))
    selective: bool = False
    reduce: str = "fp32"
    sent: tuple[SentMessage, ...] = ()
    stage: int = 0
    stages: tuple[LayoutPlan, ...] = ()

    @property
    def bytes_by_axis(self) -> dict[str, dict[str, int]]:
        """{axis: {collective: bytes that a rank sends per optimizer step}}, of each the most that a
        rank of the pipeline sends."""
        most: dict[str, dict[str, int]] = {}
        for rank in self.ranks:
            total: Counter[tuple[str, str]] = Counter()
            for message in rank.sent:
                total[message.axis, message.kind] += message.bytes
            for (axis, kind), count in total.items():
                kinds = most.setdefault(axis, {})
                kinds[kind] = max(count, kinds.get(kind, 0))
        return most

    @property
    def ranks(self) -> tuple[LayoutPlan, ...]:
        """The plan itself, which stands for all ranks, or those of the ranks of a pipeline."""
        return self.stages or (self,)

    def allocator_peaks(self, gpu: str | GPU) -> AllocatorPeaks:
        """As `Plan.allocator_peaks`.

        FSDP2 allocates the buffers of its messages on streams of their own, and PyTorch's allocator
        has pools for each stream, so that what they reserve adds up.
        """
        peaks = super().allocator_peaks(gpu)
        if not self.streams.any():
            return peaks
        gpu = find(gpu) if isinstance(gpu, str) else gpu
        workspaces = (cublas_workspace(gpu) // 2, 0, 0)
        reserved = [
            replay(self.allocation_trace.only(self.streams == stream), workspace).reserved
            for stream, workspace in enumerate(workspaces)
        ]
        return replace(peaks, reserved=sum(reserved))

    def fits(self, gpu: str | GPU, allocator: bool = True) -> Fit:
        """Whether every rank fits a GPU, as `Plan.fits`; several ranks need buffers for NCCL.

        Raises ValueError for an unknown GPU.
        """
        if self.stages:
            return max((one.fits(gpu, allocator) for one in self.stages), key=lambda fit: fit.need)
        fit = super().fits(gpu, allocator)
        if self.layout.ranks == 1:
            return fit
        return replace(fit, terms=fit.terms | {"NCCL buffers": NCCL})

    def step_seconds(
        self, gpu: Any, links: Link | str | Mapping[str, Link | str]
    ) -> step_time.StepTime:
        """The time of the step of all ranks, messages included, as `layouts.seconds.step`."""
        layout, schedule = self.layout, None
        if layout.pipeline > 1:
            schedule = schedule_of(layout.schedule, layout.pipeline, self.recipe.accumulation)
        return step_time.step([rank.operations for rank in self.ranks], gpu, links, schedule)

    def seconds_on(self, cluster: Cluster) -> step_time.StepTime:
        """The same on a cluster, whose links each axis of the layout uses as its ranks lie.

        Raises what `layouts.seconds.step` raises.
        """
        return self.step_seconds(cluster.gpu, cluster.links_of_axes(self.layout.axes))


class Asked(NamedTuple):
    """What a plan is asked for: the arguments of `plan_step`."""

    model_step: ModelStep
    layout: Layout
    device: str
    selective: bool
    reduce: str


def plan_layout(
    model: PretrainedConfig | str | Path,
    layout: Layout | str,
    *,
    device: str = "cuda",
    selective: bool = False,
    reduce: str = "fp32",
    all_layers: bool = False,
    **fields_of_step: Any,
) -> LayoutPlan:
    """Plan one optimizer step of any Hugging Face model, laid out over ranks.

    >>> from tight_fit import Cluster, plan_layout
    >>> planned = plan_layout("Qwen/Qwen3-0.6B", "fsdp=4", batch_size=4, length=512)
    >>> print(planned.fits("RTX 3060"))
    needs 4.7 GiB, the RTX 3060 has 11.8 GiB: 7.1 GiB to spare
    >>> print(f"{planned.seconds_on(Cluster('RTX 3060', per_machine=4)).total:.2f} s")
    0.34 s

    model      a configuration, a folder, a config.json, or a name on the hub (`hf_config.read`)
    layout     a `Layout`, or a text such as "fsdp=8" or "hsdp=2x4" (`layout.parse`)
    device     "cuda", or "cpu" for a step on the host
    selective  recompute only what is neither attention nor every second matrix product
               (torchtitan's "op"); `checkpointing=True` recomputes whole layers
    reduce     dtype in which FSDP2 sums gradients, "fp32" or "bf16"
    all_layers trace each layer; else those that repeat are traced once where that is proven equal
    fields_of_step  those of `ModelStep`; `batch_size` counts the examples of all ranks. Where
               nothing is said, weights are fp32 and computed in bf16: shards of FSDP2 are
               fp32, and it gathers and computes in bf16 (MixedPrecisionPolicy)
    Raises CannotPlan, ValueError or TypeError, one sentence each; RuntimeError where this process
    has a process group already.
    """
    check_device(device)
    usual = {"weights": "fp32", "precision": "bf16"}
    if fields_of_step.get("base") is not None:  # another word for `weights`
        del usual["weights"]
    layout = parse(layout) if isinstance(layout, str) else of_type("layout", layout, Layout)
    given = usual | fields_of_step | _recomputes(selective, fields_of_step)
    model_step = ModelStep.of(model, **given)
    return plan_step(model_step, layout, device, selective, reduce, all_layers)


def _recomputes(selective: bool, fields_of_step: Mapping[str, Any]) -> dict[str, Any]:
    return {"checkpointing": bool(selective or fields_of_step.get("checkpointing"))}


def plan_step(
    model_step: ModelStep,
    layout: Layout,
    device: str = "cuda",
    selective: bool = False,
    reduce: str = "fp32",
    all_layers: bool = False,
    rank: int | None = None,
    ranks: OpenRanks | None = None,
) -> LayoutPlan:
    """The same for a `ModelStep`.

    rank   the one to plan, by its number in the grid (`grid_of`), of a layout without a pipeline;
           None plans one that needs most
    ranks  those of plans before, which this one takes and keeps open
    With DDP, whose buckets hold gradients of several layers, and with ZeRO-1 and several
    micro-batches all layers are traced.
    """
    of_type("layout", layout, Layout)
    one_of("reduce", reduce, ("fp32", "bf16"))
    true_or_false("selective", selective)
    true_or_false("all_layers", all_layers)
    local_step(model_step, layout)  # or its error
    if not ranks:
        refuse_a_rank()  # before what an architecture cannot do is told
    asked = Asked(model_step, layout, device, selective, reduce)
    opened = OpenRanks() if ranks is None else nullcontext(ranks)
    with as_if_real(), as_cannot_plan(model_step), opened as there:
        if layout.pipeline > 1:
            there.close()  # each stage is another rank
            return _planned_stages(asked)
        whole = model_step.accumulation > 1 and layout.strategy == "zero1"
        repeats = layout.strategy != "ddp" and not (all_layers or whole)
        fullest = [number * layout.tensor for number in fullest_context_ranks(layout.context)]
        numbers = fullest if rank is None else [rank]
        plans = [_planned(asked, there, number, repeats) for number in numbers]
        return max(plans, key=lambda plan: plan.peak)


def fullest_context_ranks(ranks: int) -> tuple[int, ...]:
    """The numbers of the context ranks of which one needs most memory.

    The first rank attends with half of its tokens to all keys of each other, the last one with all
    tokens to half of the keys, and those between them do both.
    """
    return (0,) if ranks == 1 else (0, 1) if ranks == 2 else (1,)


def _planned(asked: Asked, ranks: OpenRanks, rank: int, repeats: bool) -> LayoutPlan:
    """The plan of one rank, of a trace of a few layers where that is proven equal."""
    if repeats:
        with suppress(NotAlike):
            return _traced(asked, ranks, rank, True)
    return _traced(asked, ranks, rank, False)


def _traced(asked: Asked, ranks: OpenRanks, rank_number: int, repeats: bool) -> LayoutPlan:
    model_step, layout, device, selective, reduce = asked

    def kernels() -> CudaKernels:
        return CudaKernels(model_step, active=device == "cuda")

    recorder = Recorder()
    ranks.over(layout.ranks, rank_number)
    taken = ranks.take(model_step, layout, kernels, selective, reduce, not repeats)
    rank = taken.rank
    with ranks.mode, FakeValues(), kernels():
        repeated = RepeatedLayers(rank.module, after=2) if repeats else None
        if repeated is not None and not repeated.stacks:
            repeated = None
        if repeated is not None:
            prefetch(running(rank.module, repeated), layout.prefetch)
        traced, sent = trace_model_rank(
            rank,
            partial(batch, taken.shape, rank.undivided),
            recorder,
            repeated,
            device == "cuda",
            selective,
            taken.settled,
        )
    ranks.keep(taken, reduce, not repeats)
    if layout.context > 1:
        _check_ring(model_step, sent)
    return _plan_of(asked, (traced, taken.parameters, sent))


def _check_ring(model_step: ModelStep, sent: tuple[SentMessage, ...]) -> None:
    """Raises CannotPlan where not every layer gathered the keys of other context ranks."""
    gathered = sum(
        (one.kind, one.axis, one.phase) == ("all_gather", "context", "forward") for one in sent
    )
    layers_of = getattr(hf_config.text_config(model_step.config), "num_hidden_layers", 1)
    if gathered < layers_of * model_step.accumulation:
        raise CannotPlan(
            f"Not every layer of {model_step.config.model_type} attends through transformers' "
            "attention interface, so context ranks would miss tokens: use data or tensor ranks."
        )


def _planned_stages(asked: Asked) -> LayoutPlan:
    """The plan of the rank of a pipeline that needs most, which holds those of all of them."""
    ranks = range(asked.layout.pipeline)
    plans = [_plan_of(asked, trace_stage(*asked, rank), rank) for rank in ranks]
    worst = max(plans, key=lambda plan: plan.peak)
    return replace(worst, stages=tuple(plans))


def _plan_of(
    asked: Asked, made: tuple[StorageTrace, int, tuple[SentMessage, ...]], stage: int = 0
) -> LayoutPlan:
    traced, parameters, sent = made
    base = to_plan((traced, parameters), asked.model_step, asked.device)
    return LayoutPlan(
        **{own.name: getattr(base, own.name) for own in fields(Plan)},
        layout=asked.layout,
        streams=streams_of(traced),
        selective=asked.selective,
        reduce=asked.reduce,
        sent=sent,
        stage=stage,
    )


def running(model: FlatLogits, repeated: RepeatedLayers) -> list[nn.Module]:
    """The transformer layers that run, in order."""
    left_out = {id(layer) for stack in repeated.stacks for layer, _ in stack.pairs()}
    return [layer for layer in layers(model) if id(layer) not in left_out]

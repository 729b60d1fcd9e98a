"""One optimizer step of a rank of a layout (`model_rank`), traced on real or on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from tight_fit.kernels.trace_ops import Recorder
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.layouts.layout import AXES
from tight_fit.layouts.messages import CommMeter, SentMessage, place_messages
from tight_fit.layouts.rank import ModelRank
from tight_fit.layouts.torch_private_ranks import rebuild_buckets, shapes_of_dtensor
from tight_fit.layouts.wrapping import kept_when_compiled
from tight_fit.techniques.optimizers import states
from tight_fit.techniques.step import Batch
from tight_fit.trace.compiled_layers import compiled_layers
from tight_fit.trace.fake_tensors import Indices
from tight_fit.trace.repeated_layers import RepeatedLayers, give_gradients, layers
from tight_fit.trace.storage_trace import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    StorageTrace,
)
from tight_fit.trace.tracker import Tracker, steady_memory

# The stream on which a storage is allocated, by the operation that made it.
STREAMS = ("", "all_gather", "reduce_scatter")


def trace_model_rank(
    rank: ModelRank,
    make_batch: Callable[[], Batch],
    recorder: Recorder,
    repeated: RepeatedLayers | None = None,
    on_gpu: bool = False,
    selective: bool = False,
    settled: bool = False,
) -> tuple[StorageTrace, tuple[SentMessage, ...]]:
    """(trace of one optimizer step of a rank, the messages it sends), with real or fake tensors.

    make_batch  gives one micro-batch of this rank, or of its context ranks together
    recorder    is told of the step's operations
    repeated    layers of which only a few run; the trace is that of all. None runs all
    on_gpu      as for `Tracker`; the trace keeps its operations only then
    selective   with layers that are compiled: what they keep is `kept_when_compiled`
    settled     whether the rank has taken steps already
    Of more micro-batches two are run, or three with DDP and ZeRO-1, which send in the last: the
    others repeat the second, which adds to gradients that are there. Raises NotAlike where
    `repeated` cannot stand for all of its layers.
    """
    accumulation = rank.local.accumulation
    sends_once = rank.ddp is not None or rank.layout.strategy == "zero1"
    count = min(accumulation, 3 if sends_once else 2)
    if not settled:
        with repeated.shortened() if repeated else nullcontext():
            settle(rank, make_batch, count if sends_once else 1)
    tracker = Tracker(recorder, on_gpu)
    order = recorder.traced.order
    sent_at: list[int] = []  # the place in `order` of each message
    axes = [axis for axis in (*AXES, "expert_data", "expert") if axis in rank.mesh]
    groups: dict[str, str] = {rank.mesh[axis].get_group().group_name: axis for axis in axes}
    if rank.layout.context > 1:
        groups[rank.mesh["shards"].get_group().group_name] = "data"
    meter = CommMeter(groups, told=lambda: sent_at.append(len(order)))
    begins: list[int] = []  # the place in `order` of each micro-batch and of the update

    def phase(name: str) -> None:
        tracker.phase(name)
        meter.phase = name
        if name == "optimizer":
            begins.append(len(order))
            if repeated is not None:
                repeated.add_gradients(tracker)

    def batches():
        for _ in range(count):
            with tracker.paused():
                micro_batch = rank.part(make_batch())
            begins.append(len(order))
            phase("forward")
            tracker.adopt(micro_batch, ACTIVATIONS)
            yield micro_batch
            del micro_batch

    with steady_memory(), shapes_unseen(tracker), tracker, meter:
        parameters = list(rank.module.parameters())
        tracker.adopt([parameters, list(rank.module.buffers())], PARAMETERS)
        tracker.adopt(states(rank.optimizer, rank.scaler), OPTIMIZER)
        # DDP's buckets stay, and so do gradients that are views of them.
        tracker.adopt(rank.buckets.buffers if rank.buckets else [], GRADIENTS)
        tracker.storage_trace.begin = len(tracker.storage_trace.events)
        tracker.watch_gradients(rank.module)
        compiled = layers(rank.module) if rank.model_step.compile else []
        keeps = kept_when_compiled if selective else None
        with (
            repeated.left_out(tracker) if repeated else nullcontext(),
            compiled_layers(compiled, tracker, keeps),
        ):
            rank.step(batches(), phase, count)
    place_messages(recorder.traced, sent_at, meter.sent)
    storage_trace = tracker.storage_trace
    storage_trace.operations = recorder.traced
    if repeated is not None:
        storage_trace, inserted = repeated.whole(tracker)
        begins = [
            begin + sum(number for place, number in inserted if place <= begin) for begin in begins
        ]
    traced = storage_trace.operations
    assert traced is not None, "there was a recorder"
    for name in storage_trace.flops:
        storage_trace.flops[name] = storage_trace.flops[name] * accumulation // count
    if accumulation > count:
        traced.repeat(begins[1], begins[2], accumulation - count)
    traced.tf32 = rank.model_step.precision == "tf32"
    sent = sent_messages(traced)
    if not on_gpu:
        storage_trace.operations = None
    return storage_trace, sent


@contextmanager
def shapes_unseen(tracker: Tracker) -> Iterator[None]:
    """Inside, the tracker does not see how DTensor finds the shape of a result.

    DTensor runs the operation at full size on tensors without values. On real ranks it remembers
    the shape; here, where all tensors are without values, it asks each time.
    """
    owner, name = shapes_of_dtensor()
    find = getattr(owner, name)

    def unseen(*given: Any) -> Any:
        with tracker.paused():
            return find(*given)

    with patch.object(owner, name, unseen):
        yield


def settle(rank: ModelRank, make_batch: Callable[[], Batch], count: int) -> None:
    """Take the steps after which no step makes anything that stays: optimizer states, DDP's
    buckets, the buffers of FSDP2's gathered weights, what DTensor works out of each operation."""

    def phase(name: str) -> None:
        if name == "optimizer" and rank.layout.strategy != "ddp":  # layers left out have none
            give_gradients(one for one in rank.module.parameters() if one.grad is None)

    def step() -> None:
        rank.step((rank.part(make_batch()) for _ in range(count)), phase, count)

    step()
    if rank.ddp:
        with Indices():
            rebuild_buckets(rank.ddp)
        step()


def streams_of(trace: StorageTrace) -> np.ndarray:
    """int8 [storages], index into `STREAMS` of the stream on which FSDP2 allocates each."""
    return np.array(
        [STREAMS.index(made_by) if made_by in STREAMS else 0 for made_by in trace.made_by], np.int8
    )


def sent_messages(traced: TracedOps) -> tuple[SentMessage, ...]:
    """The messages of a trace in the order of sending, those of all micro-batches."""
    phases = ("forward", "backward", "backward", "optimizer")  # recomputation is in the backward
    sent = []
    for index, phase in traced.issued():
        for op in traced.ops[index]:
            if op.kind == "message" and op.shape:
                sent.append(
                    SentMessage(op.name, op.read, op.shape[0], op.layout, phases[int(phase)])
                )
    return tuple(sent)

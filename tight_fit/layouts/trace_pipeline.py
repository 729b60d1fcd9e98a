"""One optimizer step of a rank of a pipeline (`pipeline_rank`), traced on real or fake tensors."""

from __future__ import annotations

from collections.abc import Callable

from tight_fit.kernels.trace_ops import Recorder
from tight_fit.layouts.layout import AXES
from tight_fit.layouts.messages import CommMeter, SentMessage, place_messages
from tight_fit.layouts.pipeline_rank import PipelineRank
from tight_fit.layouts.torch_private_ranks import whole_gradients
from tight_fit.layouts.trace import sent_messages, shapes_unseen
from tight_fit.techniques.optimizers import states
from tight_fit.techniques.step import Batch
from tight_fit.trace.storage_trace import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    StorageTrace,
)
from tight_fit.trace.tracker import Tracker, steady_memory


def trace_pipeline_rank(
    rank: PipelineRank,
    make_batch: Callable[[], Batch],
    recorder: Recorder,
    on_gpu: bool = False,
) -> tuple[StorageTrace, tuple[SentMessage, ...]]:
    """(trace of one optimizer step of a rank, the messages it sends), as `trace_model_rank`.

    make_batch  gives the batch of this data rank, all micro-batches together
    The buffers that receive messages are there before the step and count as activations.
    """
    rank.settle(make_batch())
    tracker = Tracker(recorder, on_gpu)
    order = recorder.traced.order
    sent_at: list[int] = []  # the place in `order` of each message
    passes: list[int] = []  # the place in `order` of each action of the schedule
    meter = CommMeter(
        {rank.mesh[axis].get_group().group_name: axis for axis in AXES},
        told=lambda: sent_at.append(len(order)),
    )

    def gradients() -> None:
        tracker.adopt([parameter.grad for parameter in rank.module.parameters()], GRADIENTS)
        tracker.adopt(whole_gradients(rank.module), GRADIENTS)

    def begun(phase: str) -> None:
        tracker.phase(phase)
        meter.phase = phase
        if phase != "optimizer":
            passes.append(len(order))

    with steady_memory(), shapes_unseen(tracker), tracker, meter:
        tracker.adopt([list(rank.module.parameters()), list(rank.module.buffers())], PARAMETERS)
        tracker.adopt(states(rank.optimizer), OPTIMIZER)
        tracker.adopt([buckets.buffers for buckets in rank.buckets], GRADIENTS)
        gradients()  # those that exist already are views of DDP's buckets
        tracker.adopt(rank.buffers, ACTIVATIONS)
        tracker.storage_trace.begin = len(tracker.storage_trace.events)
        tracker.watch_gradients(rank.module)
        with tracker.paused():
            batch = make_batch()
        tracker.phase("forward")
        tracker.adopt(_read(rank, batch), ACTIVATIONS)
        rank.step(batch, begun, gradients)
        del batch
    traced = recorder.traced
    place_messages(traced, sent_at, meter.sent)
    traced.passes = tuple(passes)
    traced.tf32 = rank.model_step.precision == "tf32"
    storage_trace = tracker.storage_trace
    storage_trace.operations = traced if on_gpu else None
    return storage_trace, sent_messages(traced)


def _read(rank: PipelineRank, batch: Batch) -> Batch:
    """What the stages of a rank read of a batch: the tokens, the labels, both or nothing."""
    names = ["input_ids"] * rank.first + ["labels"] * rank.last
    return {name: batch[name] for name in names}

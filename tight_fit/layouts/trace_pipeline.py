"""One optimizer step of a rank of a pipeline (`pipeline_rank`), traced on real or fake tensors.

torch's own schedules run, for a plan on tensors without values over a process group that sends
nothing, with all micro-batches and all layers. Stages differ in what they hold: the first holds
most micro-batches of 1F1B, the last has the head and the logits. So each rank is planned by itself.

Proven byte for byte against real gloo ranks that run torch.distributed.pipelining on small Llamas
and Qwen3s: all four schedules on two ranks, and with DDP and FSDP2 over two data ranks each on
four, by their peaks, messages, FLOPs and weights (tests/layouts/test_plan_pipeline.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tight_fit.kernels.trace_ops import Recorder
from tight_fit.layouts.fake_rank import fake_rank, fake_ranks
from tight_fit.layouts.layout import AXES, Layout
from tight_fit.layouts.messages import CommMeter, SentMessage, place_messages
from tight_fit.layouts.pipeline_rank import PipelineRank
from tight_fit.layouts.rank import grid_of, local_step
from tight_fit.layouts.torch_private_ranks import sent_until_waited_for, whole_gradients
from tight_fit.layouts.trace import sent_messages, shapes_unseen
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import batch
from tight_fit.techniques.optimizers import states
from tight_fit.techniques.step import Batch
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues
from tight_fit.trace.storage_trace import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    StorageTrace,
)
from tight_fit.trace.tracker import Tracker, steady_memory


def trace_stage(
    model_step: ModelStep, layout: Layout, device: str, selective: bool, reduce: str, rank: int
) -> tuple[StorageTrace, int, tuple[SentMessage, ...]]:
    """(trace of the step of the first data rank of one rank of the pipeline, number of the whole
    model's parameters, the messages that the rank sends).

    rank  along the pipeline, from 0
    """

    def kernels() -> CudaKernels:
        return CudaKernels(model_step, active=device == "cuda")

    recorder = Recorder()
    with fake_ranks(layout.ranks, rank * layout.data), sent_until_waited_for():
        mesh = grid_of(layout)  # its tensors have values: before FakeTensorMode
        with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), kernels():
            fake, shape, parameters = fake_rank(
                PipelineRank, model_step, layout, mesh, kernels, selective, reduce
            )
            whole = replace(local_step(model_step, layout), accumulation=1)
            make_batch = partial(batch, shape, whole)
            traced, sent = trace_pipeline_rank(fake, make_batch, recorder, device == "cuda")
            del fake  # its tensors belong to the process group that ends here
    return traced, parameters, sent


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

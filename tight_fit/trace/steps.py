"""One optimizer step followed storage by storage, on real tensors or on fake ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from tight_fit.kernels.trace_ops import Recorder
from tight_fit.optimizer_kinds import KINDS
from tight_fit.techniques.compiled import not_compiled
from tight_fit.techniques.host_optimizer import HostOptimizer
from tight_fit.techniques.library_optimizers import paged_states
from tight_fit.techniques.optimizers import states
from tight_fit.techniques.preferences import as_reference, log_probs
from tight_fit.techniques.settings import StepSettings
from tight_fit.techniques.step import Batch, train_step
from tight_fit.trace.compiled_layers import compiled_layers
from tight_fit.trace.generation import write_completions
from tight_fit.trace.repeated_layers import RepeatedLayers
from tight_fit.trace.storage_trace import ACTIVATIONS, HOST, OPTIMIZER, PARAMETERS, StorageTrace
from tight_fit.trace.tracker import Tracker, steady_memory


def trace_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    make_batch: Callable[[], Batch],
    recipe: StepSettings,
    scaler: torch.amp.GradScaler | None = None,
    recorder: Recorder | None = None,
    repeated: RepeatedLayers | None = None,
    compiled: Iterable[torch.nn.Module] = (),
) -> StorageTrace:
    """Run one optimizer step under the tracker and return its trace.

    Of several micro-batches two are run, since the others repeat the second; FLOPs are counted for
    all. Optimizer and scaler must have taken a step before, so that their states exist.

    make_batch  makes one micro-batch; what it needs to do so is not part of the trace
    recorder    is told of the step's operations; the trace then holds them, those of all
                micro-batches
    With task="grpo" the step begins with the completions that are written for all micro-batches,
    whose memory is in the trace, and neither FLOPs nor operations.

    repeated    layers of the model of which only a few run; the trace is that of all. None runs all
    compiled    layers that are compiled, on fake tensors only (`compiled_layers`)
    Raises NotAlike where `repeated` cannot stand for all of its layers.
    """
    count = min(recipe.accumulation, 2)
    tracker = Tracker(recorder, on_gpu=recorder is not None)
    begins: list[int] = []  # number of operations at which a micro-batch or the optimizer begins

    def batches():
        for _ in range(count):
            with tracker.paused():
                batch = make_batch()
            begins.append(len(recorder.traced.order) if recorder else 0)
            tracker.phase("forward")
            tracker.adopt(batch, ACTIVATIONS)
            yield batch
            del batch

    def phase(name: str) -> None:
        tracker.phase(name)
        if name == "optimizer":
            begins.append(len(recorder.traced.order) if recorder else 0)
            if repeated is not None:
                repeated.add_gradients(tracker)
            tracker.storage_trace.reached = frozenset(
                place
                for place, parameter in enumerate(model.parameters())
                if parameter.grad is not None
                or (recipe.optimizer_in_backward and parameter.requires_grad)
            )

    with steady_memory(), not_compiled(model), tracker, ExitStack() as shortened:
        tracker.adopt([list(model.parameters()), list(model.buffers())], PARAMETERS)
        kind = KINDS[recipe.optimizer]
        paged = kind.paged and recorder is not None
        on_host = _on_host(optimizer, paged)
        tracker.adopt(on_host, HOST)
        there = {id(tensor) for tensor in on_host}
        kept = states(optimizer, scaler)
        if kind.counts_on_host and recorder is not None:
            counters = [state["step"] for state in optimizer.state.values()]
            tracker.leave_out(counters)
            there |= {id(tensor) for tensor in counters}
        tracker.adopt([tensor for tensor in kept if id(tensor) not in there], OPTIMIZER)
        tracker.storage_trace.begin = len(tracker.storage_trace.events)
        tracker.watch_gradients(model)
        examples = recipe.micro_batch * count
        if recipe.task == "grpo":
            write_completions(model, recipe, tracker)
            _compare(model, make_batch, recipe, tracker)
        if repeated is not None:
            shortened.enter_context(repeated.left_out(tracker))
        shortened.enter_context(compiled_layers(compiled, tracker))
        train_step(model, optimizer, batches(), examples, recipe, phase, scaler)
    storage_trace = tracker.storage_trace
    if recorder is not None:
        storage_trace.operations = recorder.traced
    if repeated is not None:
        storage_trace, inserted = repeated.whole(tracker)
        begins = [
            begin + sum(count for place, count in inserted if place <= begin) for begin in begins
        ]
    flops = storage_trace.flops
    for name in flops:
        flops[name] = flops[name] * recipe.accumulation // count
    if storage_trace.operations is not None:
        storage_trace.operations.repeat(begins[-2], begins[-1], recipe.accumulation - count)
        storage_trace.operations.tf32 = recipe.precision == "tf32"
    return storage_trace


def _compare(
    model: Any, make_batch: Callable[[], Batch], recipe: StepSettings, tracker: Tracker
) -> None:
    """The reference's pass over the completions of a micro-batch, where there is a reference."""
    with tracker.paused():
        batch = make_batch()
    if "reference" in batch:
        recorder, tracker.recorder = tracker.recorder, None
        with torch.no_grad(), as_reference(model) as other:
            log_probs(other, batch, recipe)
        tracker.recorder = recorder
        tracker.storage_trace.flops.pop("generation", None)


def _on_host(optimizer: torch.optim.Optimizer, paged: bool) -> list[torch.Tensor]:
    """What an optimizer keeps in the host's memory; `paged` is that of a GPU that is not there."""
    if isinstance(optimizer, HostOptimizer):
        return optimizer.in_host_memory()
    return paged_states(optimizer, planned=paged)

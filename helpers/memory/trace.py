"""One optimizer step followed storage by storage, on real tensors or on fake ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

from helpers.memory.tracker import (
    ACTIVATIONS,
    OPTIMIZER,
    PARAMETERS,
    StorageTrace,
    Tracker,
    steady_memory,
)
from helpers.optimizers import states
from helpers.recipe import StepSettings
from helpers.step import Batch, train_step
from helpers.timing.trace_ops import Recorder


def trace_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    make_batch: Callable[[], Batch],
    recipe: StepSettings,
    scaler: torch.amp.GradScaler | None = None,
    recorder: Recorder | None = None,
) -> StorageTrace:
    """Run one optimizer step under the tracker and return its trace.

    Of several micro-batches two are run, since the others repeat the second; FLOPs are counted for
    all. Optimizer and scaler must have taken a step before, so that their states exist.

    make_batch  makes one micro-batch; what it needs to do so is not part of the trace
    recorder    is told of the step's operations; the trace then holds them, those of all
                micro-batches
    """
    count = min(recipe.accumulation, 2)
    tracker = Tracker(recorder)
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

    with steady_memory(), tracker:
        tracker.adopt([list(model.parameters()), list(model.buffers())], PARAMETERS)
        tracker.adopt(states(optimizer, scaler), OPTIMIZER)
        tracker.storage_trace.begin = len(tracker.storage_trace.events)
        tracker.watch_gradients(model)
        examples = recipe.micro_batch * count
        train_step(model, optimizer, batches(), examples, recipe, phase, scaler)
    flops = tracker.storage_trace.flops
    for name in flops:
        flops[name] = flops[name] * recipe.accumulation // count
    if recorder is not None:
        recorder.traced.repeat(begins[-2], begins[-1], recipe.accumulation - count)
        recorder.traced.tf32 = recipe.precision == "tf32"
        tracker.storage_trace.operations = recorder.traced
    return tracker.storage_trace

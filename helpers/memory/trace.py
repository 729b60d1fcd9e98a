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


def trace_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    make_batch: Callable[[], Batch],
    recipe: StepSettings,
    scaler: torch.amp.GradScaler | None = None,
) -> StorageTrace:
    """Run one optimizer step under the tracker and return its trace.

    Of several micro-batches two are run, since the others repeat the second; FLOPs are counted for
    all. Optimizer and scaler must have taken a step before, so that their states exist.

    make_batch  makes one micro-batch; what it needs to do so is not part of the trace
    """
    count = min(recipe.accumulation, 2)
    tracker = Tracker()

    def batches():
        for _ in range(count):
            with tracker.paused():
                batch = make_batch()
            tracker.phase("forward")
            tracker.adopt(batch, ACTIVATIONS)
            yield batch
            del batch

    with steady_memory(), tracker:
        tracker.adopt([list(model.parameters()), list(model.buffers())], PARAMETERS)
        tracker.adopt(states(optimizer, scaler), OPTIMIZER)
        tracker.storage_trace.begin = len(tracker.storage_trace.events)
        tracker.watch_gradients(model)
        examples = recipe.micro_batch * count
        train_step(model, optimizer, batches(), examples, recipe, tracker.phase, scaler)
    flops = tracker.storage_trace.flops
    for name in flops:
        flops[name] = flops[name] * recipe.accumulation // count
    return tracker.storage_trace

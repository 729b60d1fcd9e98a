"""One optimizer step followed storage by storage, on real tensors or on tensors without values."""

from __future__ import annotations

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
from helpers.recipe import Recipe
from helpers.step import train_step


def trace_step(
    model, optimizer, make_batch, recipe: Recipe, scaler: torch.amp.GradScaler | None = None
) -> StorageTrace:
    """Run one optimizer step under the tracker, on fake or on real tensors. `make_batch()` gives a micro-batch;
    optimizer and scaler must have taken a step before, so that their states exist."""
    count = min(recipe.accumulation, 2)
    tracker = Tracker()

    def batches():
        for _ in range(count):
            with tracker.looking_away():
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
        train_step(
            model, optimizer, batches(), recipe.micro_batch * count, recipe, tracker.phase, scaler
        )
    for name in tracker.storage_trace.flops:
        tracker.storage_trace.flops[name] = (
            tracker.storage_trace.flops[name] * recipe.accumulation // count
        )
    return tracker.storage_trace

"""One real training step, measured by instruments that share no code with the planner.

On a GPU: torch.cuda.max_memory_allocated and max_memory_reserved. On a CPU: the record that
PyTorch's allocator keeps of every allocation (torch.profiler with profile_memory=True), which sees
five things that the plan does not:

- a number that autograd keeps is a tensor of eight bytes;
- checkpointing sets aside the state of the random number generator, 5,056 bytes, while it
  recomputes a layer;
- a bf16 matrix product of oneDNN takes working memory inside its kernel, 1.4 MB in ViT-B/16;
- `gather` and `scatter_add_`, by which DeBERTa picks its relative positions, take four bytes per
  element;
- bitsandbytes' CPU kernel for states in 32 bits makes three copies of the tensor that it updates
  (backends/cpu/ops.py), for example of the vocabulary.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from helpers import models
from helpers.measure import MEASURED, SCALES, WARM_UP, release
from helpers.plan import fake_batch
from helpers.recipe import Recipe, replace
from tight_fit.techniques.optimizers import make_optimizer, make_scaler, states
from tight_fit.techniques.step import Batch, tensor_cores, train_step
from tight_fit.trace.tracker import steady_memory

T = TypeVar("T")
LEAST_TIMED, MOST_TIMED = 5, 50  # steps whose seconds are measured on a GPU


def measure(recipe: Recipe, device: str) -> dict[str, int | float]:
    """Measure one optimizer step of a recipe with random weights on "cuda" or "cpu".

    Returns {"allocated": bytes}, on a GPU also {"reserved": bytes, "seconds": the median of steps
    whose batches are there before they begin}. Call it in a fresh process: what an allocator or a
    kernel keeps of an earlier step would be in the figures.
    Raises RuntimeError where fp16 takes no step.
    """
    model = models.build(replace(recipe, weights="random"))
    with tensor_cores(recipe), alone_on_the_gpu() if device == "cuda" else nullcontext():
        found = _measured(model, recipe, device)
        del model
        release()  # the GPU's memory, before the next step has its turn
    return found


def _measured(model: torch.nn.Module, recipe: Recipe, device: str) -> dict[str, int | float]:
    model = model.to(device)
    optimizer, scaler = make_optimizer(model, recipe), make_scaler(recipe, device)

    def batches(recipe: Recipe) -> Iterator[Batch]:
        return (real_batch(model, recipe, device) for _ in range(recipe.accumulation))

    def step(recipe: Recipe, made: Iterable[Batch] | None = None) -> bool:
        """Whether it changed the weights: fp16 skips steps whose loss scale is too high."""
        scale = scaler.get_scale()
        made = iter(batches(recipe) if made is None else made)
        train_step(model, optimizer, made, recipe.batch_size, recipe, scaler=scaler)
        return scaler.get_scale() >= scale

    # The first step gives the optimizer its states. On a CPU a small one does.
    first = recipe if device == "cuda" else replace(recipe, batch_size=1, accumulation=1)
    _until(lambda: step(first))
    if device == "cuda":
        peaks = memory_on_a_gpu(lambda: step(recipe))
        ready = list(batches(recipe))  # making them is not a part of the step
        return peaks | {"seconds": seconds_on_a_gpu(lambda: step(recipe, ready))}
    held = [*model.parameters(), *model.buffers(), *states(optimizer, scaler)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
    bytes_held = sum(storage.nbytes() for storage in storages.values())
    peaks = {}

    def watched() -> bool:
        gc.collect()
        with steady_memory():
            taken, most = recorded(lambda: step(recipe))
        peaks["allocated"] = bytes_held + most
        return taken

    _until(watched)
    return peaks


def _until(step: Callable[[], bool]) -> None:
    """Repeat a step until it changes the weights: fp16 lowers its loss scale until one does."""
    for _ in range(SCALES):
        if step():
            return
    raise RuntimeError(f"None of {SCALES} steps in fp16 was taken: the gradients are not finite.")


@contextmanager
def alone_on_the_gpu() -> Iterator[None]:
    """Steps that are prepared side by side wait here for each other, so that times are true."""
    import fcntl

    with (Path(tempfile.gettempdir()) / "tight-fit-gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def seconds_on_a_gpu(step: Callable[[], object], times: int | None = None) -> float:
    """The median of some steps' seconds, by CUDA events; about a second in all.

    times  so many steps, as ranks that wait for each other must all take as many
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    seconds: list[float] = []
    least, most = (times, times) if times else (LEAST_TIMED, MOST_TIMED)
    while len(seconds) < least or (sum(seconds) < 1 and len(seconds) < most):
        torch.cuda.synchronize()
        marks[0].record()
        step()
        marks[1].record()
        torch.cuda.synchronize()
        seconds.append(marks[0].elapsed_time(marks[1]) / 1000)
    return statistics.median(seconds)


def memory_on_a_gpu(step: Callable[[], object]) -> dict[str, int | float]:
    """The most bytes of tensors, and of the caching allocator, in some steps after some others."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(MEASURED):
        step()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def recorded(work: Callable[[], T]) -> tuple[T, int]:
    """(what `work()` returns, peak of PyTorch's CPU allocator during it).

    The peak is in bytes above what was allocated before.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return result, most


def real_batch(model: torch.nn.Module, recipe: Recipe, device: str) -> Batch:
    """A micro-batch with values in the shapes of the plan: random tokens or images, no padding.

    Of the model only its configuration counts.
    """
    batch = fake_batch(model, recipe)
    if recipe.tokens is not None:
        first_word = 5  # the tokens before it have a meaning of their own
        batch["input_ids"].random_(first_word, model.config.vocab_size)
    else:
        batch["pixel_values"].normal_()
    return {name: value.to(device) for name, value in batch.items()}

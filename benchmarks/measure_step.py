"""One real training step, measured by instruments that share no code with the planner.

    cuda   torch.cuda.max_memory_allocated and max_memory_reserved
    cpu    allocated: the record that PyTorch's allocator keeps of every allocation (torch.profiler, profile_memory=True);
           resident: what Linux says the process gained since before the model was made (/proc/self/status, VmHWM)

Five things on a CPU are seen by the allocator and not by the plan: a number that autograd keeps is a tensor of eight bytes;
checkpointing sets aside the state of the random numbers, 5,056 bytes, while it recomputes a layer; a bf16 matrix product of
oneDNN takes memory to work in, of 1.4 MB in ViT-B/16, inside its kernel; `gather` and `scatter_add_`, by which DeBERTa picks its
relative positions, take four bytes an element; and bitsandbytes' CPU kernel for states in 32 bits makes three copies of the tensor
that it steps (backends/cpu/ops.py), the vocabulary for example.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from helpers import memory, models
from helpers.memory.tracker import steady_memory
from helpers.optimizers import make_optimizer, make_scaler, states
from helpers.plan.planner import fake_batch
from helpers.recipe import Recipe, replace
from helpers.step import Batch, tensor_cores, train_step

T = TypeVar("T")


def measure(recipe: Recipe, device: str) -> dict[str, int | None]:
    """{"allocated", "reserved", "resident": bytes; "parameters", "trained": counts} of one step. To be called in a fresh process:
    what an allocator or a kernel keeps of an earlier step would be in the figures."""
    before = _status("VmRSS")
    with tensor_cores(recipe):
        model = models.build(replace(recipe, weights="random")).to(device)
        optimizer, scaler = make_optimizer(model, recipe), make_scaler(recipe, device)

        def step(recipe: Recipe) -> bool:
            """Whether it changed the weights: fp16 skips steps until the loss scale is low enough."""
            scale = scaler.get_scale()
            batches = (real_batch(model, recipe, device) for _ in range(recipe.accumulation))
            train_step(model, optimizer, batches, recipe.batch_size, recipe, scaler=scaler)
            return scaler.get_scale() >= scale

        first = recipe if device == "cuda" else replace(recipe, batch_size=1, accumulation=1)
        _until(lambda: step(first))
        found = (
            _on_a_gpu(step, recipe)
            if device == "cuda"
            else _on_the_cpu(
                step,
                recipe,
                before,
                [*model.parameters(), *model.buffers(), *states(optimizer, scaler)],
            )
        )
    numbers = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return found | {
        "parameters": sum(count for count, _ in numbers),
        "trained": sum(count for count, trains in numbers if trains),
    }


def _until(step: Callable[[], bool]) -> None:
    for _ in range(memory.SCALES):
        if step():
            return
    raise RuntimeError(
        f"None of {memory.SCALES} steps in fp16 was taken: the gradients are not finite."
    )


def _on_a_gpu(step, recipe: Recipe) -> dict[str, int | None]:
    for _ in range(memory.WARM_UP):
        step(recipe)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(memory.MEASURED):
        step(recipe)
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "resident": None,
    }


def _on_the_cpu(
    step, recipe: Recipe, before: int | None, there: list[torch.Tensor]
) -> dict[str, int | None]:
    held = sum(
        {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in there
        }.values()
    )
    found: dict[str, int | None] = {"reserved": None}

    def watched() -> bool:
        gc.collect()
        forgotten = _forget_peak()
        with steady_memory():
            taken, most = recorded(lambda: step(recipe))
        peak = _status("VmHWM")
        found["resident"] = peak - before if forgotten and peak and before else None
        found["allocated"] = held + most
        return taken

    _until(watched)
    return found


def recorded(work: Callable[[], T]) -> tuple[T, int]:
    """(what `work()` gives, the most bytes that PyTorch's CPU allocator had given out meanwhile, above those of before)."""
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
    """A micro-batch with values, in the plan's shapes: random tokens without padding, or random pictures."""
    made = fake_batch(model, recipe)
    if recipe.task == "text":
        made["input_ids"].random_(
            5, model.config.vocab_size
        )  # the first ones have a meaning of their own
    else:
        made["pixel_values"].normal_()
    return {name: value.to(device) for name, value in made.items()}


def _status(name: str) -> int | None:
    """A line of Linux' /proc/self/status in bytes, None elsewhere."""
    try:
        found = re.search(
            rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
        )
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _forget_peak() -> bool:
    """Set VmHWM back to what is resident now (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True

"""Out of memory, explained: how much is missing on the GPU, and what would make the step fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from helpers import measure
from helpers.plan.planner import plan, remedies_of
from helpers.recipe import Recipe
from tight_fit.gpus import GPU, device_of, here
from tight_fit.units import size

T = TypeVar("T")


class OutOfMemory(RuntimeError):
    """A fine-tune did not fit; the message says by how much and which fields would make it fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's own error and for the CPU allocator's, which is a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def or_explain(recipe: Recipe, work: Callable[[], T]) -> T:
    """Return what `work()` returns.

    Raises OutOfMemory where memory does not suffice for it, after everything that the failed step
    held has been released.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the handler nothing refers to the frames of the failed step any more, so its tensors
    # can be freed.
    measure.release()
    raise OutOfMemory(explain(recipe))


def explain(recipe: Recipe, gpu: GPU | None = None) -> str:
    """One sentence of diagnosis and one of remedies for a recipe on a GPU (None: this machine)."""
    gpu = gpu or here()
    fit = plan(recipe, device_of(gpu)).fits(gpu)
    if fit:
        return (
            f"Out of memory, although the plan needs only {size(fit.need)} of the "
            f"{size(gpu.memory)} of {gpu.name}: something else holds memory there; "
            "restart other notebooks and try again."
        )
    diagnosis = (
        f"Out of memory: the plan needs {size(fit.need)}, {size(fit.over)} more than the "
        f"{size(gpu.memory)} of {gpu.name}."
    )
    changes = remedies_of(recipe, gpu).changes()
    if not changes:
        return (
            f"{diagnosis} No field of the recipe makes it fit: "
            "take a smaller model, shorter examples or a larger GPU."
        )
    options = " or ".join(
        ", ".join(f"{name}={value!r}" for name, value in change.items()) for change in changes
    )
    return f"{diagnosis} These fit: {options}."

"""Out of memory, said in a sentence: how far over the card, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from helpers import memory
from helpers.gpus import GPU, here
from helpers.memory.timeline import Plan
from helpers.plan.planner import plan
from helpers.recipe import Recipe
from helpers.units import size

T = TypeVar("T")


class OutOfMemory(RuntimeError):
    """The fine-tune did not fit; the message says by how much and which fields would make it fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's own error and for the CPU allocator's, which is a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def or_explain(recipe: Recipe, work: Callable[[], T]) -> T:
    """What `work()` gives. Where memory does not suffice for it, raises OutOfMemory, with everything it held released."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Here, outside the handler, nothing refers to the failed step's frames any more: its tensors can go.
    memory.release()
    raise OutOfMemory(explain(recipe))


def explain(recipe: Recipe, gpu: GPU | None = None) -> str:
    """One sentence of diagnosis and one of remedies for a recipe on a card (this machine's by default)."""
    gpu = gpu or here()
    target = "cpu" if gpu.capability == (0, 0) else "cuda"
    fit = plan(recipe, target).fits(gpu)
    if fit:
        return (
            f"Out of memory, although the plan needs only {size(fit.need)} of the {size(gpu.memory)} of "
            f"{gpu.name}: something else holds memory there; restart other notebooks and try again."
        )
    found = remedies(recipe, gpu)
    ways = " or ".join(
        ", ".join(f"{name}={value!r}" for name, value in change.items()) for change in found
    )
    return (
        f"Out of memory: the plan needs {size(fit.need)}, {size(fit.over)} more than the {size(gpu.memory)} of "
        f"{gpu.name}. "
        + (
            f"These fit: {ways}."
            if found
            else "No field of the recipe makes it fit: take a smaller model, shorter rows or a larger card."
        )
    )


def at_least(now: Plan, accumulation: int) -> int:
    """Bytes that the same step takes at least with more micro-batches, without planning it: when a forward pass ends, weights,
    states, and of the activations the share of a micro-batch (what does not grow with the rows only adds to it)."""
    most = now.highest
    return (
        most["parameters"]
        + most["optimizer states"]
        + most["activations"] * now.recipe.accumulation // accumulation
    )


def remedies(recipe: Recipe, gpu: GPU) -> list[dict]:
    """Changes of the recipe that fit the card: single fields first; all of them together if none does alone."""
    target = "cpu" if gpu.capability == (0, 0) else "cuda"
    now = plan(recipe, target)
    divisors = [
        n
        for n in range(recipe.accumulation + 1, recipe.batch_size + 1)
        if recipe.batch_size % n == 0 and at_least(now, n) <= gpu.memory
    ]
    single: list[dict] = [{"accumulation": n} for n in divisors]
    if not recipe.checkpointing:
        single.append({"checkpointing": True})
    half = "bf16" if gpu.bf16 else "fp16"
    if recipe.precision not in ("bf16", "fp16") and target == "cuda":
        single.append({"precision": half})
    if recipe.optimizer == "adamw":
        single.append({"optimizer": "adamw8bit"})
    if recipe.lora_rank is None and recipe.frozen != recipe.layers:
        single.append({"lora_rank": 8})
    fits, seen = [], set()
    for change in single:
        field = next(iter(change))
        if field not in seen and plan(replace(recipe, **change), target).fits(gpu):
            seen.add(field)  # the smallest accumulation that fits is enough
            fits.append(change)
    if fits:
        return fits
    together: dict = {}
    for change in single:
        together |= change
    return [together] if together and plan(replace(recipe, **together), target).fits(gpu) else []

"""One optimizer step: the only one of the course. The loop runs it, the planner runs it on tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F

from helpers.recipe import Recipe

Batch = dict[str, torch.Tensor]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def loss_sum(model: torch.nn.Module, batch: Batch, recipe: Recipe) -> torch.Tensor:
    """Cross entropy summed over the rows of a micro-batch, fp32 scalar."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with autocast(recipe, batch["labels"].device):
        logits = model(**inputs).logits
        logits = (
            logits.float() if logits.dtype in AUTOCAST.values() else logits
        )  # a sum of losses overflows fp16
        return F.cross_entropy(logits, batch["labels"], reduction="sum")


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Batch],
    rows: int,
    recipe: Recipe,
    phase: Callable[[str], None] = lambda name: None,
    scaler: torch.amp.GradScaler | None = None,
) -> torch.Tensor:
    """Accumulate over the micro-batches, clip, update, clear. Returns the mean loss (fp32 scalar, on the device).

    Each micro-batch's loss is a sum divided by `rows`, the rows of the whole group: so the gradient is that of the
    full batch, also when the last micro-batch, or the last group, is smaller. `phase` is told "forward",
    "backward" and "optimizer" as they begin. fp16 needs its `scaler` (`make_scaler`), kept from step to step: it is
    undone once for the whole group, before the norm is taken; a step whose gradients overflow changes nothing.
    Raises ValueError for fp16 without one.
    """
    scaler = _usable(scaler, recipe)
    total = 0.0
    for batch in micro_batches:
        phase("forward")
        loss = loss_sum(model, batch, recipe) / rows
        phase("backward")
        scaler.scale(loss).backward()
        total = total + loss.detach()
    phase("optimizer")
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm, foreach=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total


def _usable(scaler: torch.amp.GradScaler | None, recipe: Recipe) -> torch.amp.GradScaler:
    if scaler is None and recipe.precision == "fp16":
        raise ValueError(
            "precision='fp16' needs a loss scaler that lives as long as the training: "
            "pass scaler=make_scaler(recipe, device)."
        )
    return _OFF if scaler is None else scaler


_OFF = torch.amp.GradScaler("cpu", enabled=False)


def autocast(recipe: Recipe, device: torch.device):
    """The precision of a forward pass as a context."""
    if recipe.precision in AUTOCAST:
        return torch.autocast(device.type, AUTOCAST[recipe.precision])
    return nullcontext()


def learning_rate(recipe: Recipe, step: int) -> float:
    """Rate of step `step` (from 0): linear warm-up to the peak, then linear to 0. A function of the step alone."""
    warm = round(recipe.warmup * recipe.steps)
    if step < warm:
        return recipe.peak_learning_rate * (step + 1) / warm
    return recipe.peak_learning_rate * (recipe.steps - step) / max(1, recipe.steps - warm)


@contextmanager
def tensor_cores(recipe: Recipe):
    """TF32 for matrix products and convolutions exactly when the recipe says so; put back afterwards.

    PyTorch leaves it off for matrix products and on for convolutions; left so, "fp32" would be neither.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if recipe.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = recipe.precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]

"""One optimizer step, the only one of the course: the loop runs it, and the planner on fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F

from helpers.recipe import Recipe, StepSettings

Batch = dict[str, torch.Tensor]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def loss_sum(model: torch.nn.Module, batch: Batch, recipe: StepSettings) -> torch.Tensor:
    """Cross entropy summed over the examples of a micro-batch, an fp32 scalar.

    batch  the model's inputs, and "labels", int64 [labels]
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with autocast(recipe, batch["labels"].device):
        logits = model(**inputs).logits
        if logits.dtype in AUTOCAST.values():
            logits = logits.float()  # a sum of losses overflows fp16
        return F.cross_entropy(logits, batch["labels"], reduction="sum")


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Batch],
    examples: int,
    recipe: StepSettings,
    phase: Callable[[str], object] = lambda name: None,
    scaler: torch.amp.GradScaler | None = None,
) -> torch.Tensor:
    """Accumulate over the micro-batches, clip, update, clear.

    Returns the mean loss, an fp32 scalar on the device of the model.

    examples  in all micro-batches together. Each micro-batch's loss is a sum divided by this
              number, so that the gradient is that of the full batch, also when the last micro-batch
              or the last step of an epoch is smaller
    phase     is called with "forward", "backward" and "optimizer" as they begin
    scaler    of fp16 (`make_scaler`), kept from step to step. Gradients are unscaled once, before
              their norm is taken; a step whose gradients overflow changes nothing
    Raises ValueError for fp16 without a scaler.
    """
    scaler = _usable(scaler, recipe)
    total: torch.Tensor | float = 0.0
    for batch in micro_batches:
        phase("forward")
        loss = loss_sum(model, batch, recipe) / examples
        phase("backward")
        scaler.scale(loss).backward()
        total = total + loss.detach()
    phase("optimizer")
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm, foreach=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return torch.as_tensor(total)


_OFF = torch.amp.GradScaler("cpu", enabled=False)


def _usable(scaler: torch.amp.GradScaler | None, recipe: StepSettings) -> torch.amp.GradScaler:
    if scaler is None and recipe.precision == "fp16":
        raise ValueError(
            "precision='fp16' needs a loss scaler that lives as long as the training: "
            "pass scaler=make_scaler(recipe, device)."
        )
    return _OFF if scaler is None else scaler


def autocast(recipe: StepSettings, device: torch.device) -> AbstractContextManager:
    """The precision of a forward pass, as a context."""
    if recipe.precision in AUTOCAST:
        return torch.autocast(device.type, AUTOCAST[recipe.precision])
    return nullcontext()


def learning_rate(recipe: Recipe, step: int) -> float:
    """Learning rate of step `step` (from 0): linear warm-up to the peak, then linear decay to 0."""
    warm_up = round(recipe.warmup * recipe.steps)
    if step < warm_up:
        return recipe.peak_learning_rate * (step + 1) / warm_up
    return recipe.peak_learning_rate * (recipe.steps - step) / max(1, recipe.steps - warm_up)


@contextmanager
def tensor_cores(recipe: StepSettings) -> Iterator[None]:
    """TF32 for matrix products and convolutions exactly when the recipe says so; restored after.

    PyTorch's default is off for matrix products and on for convolutions: with it, "fp32" would be
    neither.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if recipe.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = recipe.precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]

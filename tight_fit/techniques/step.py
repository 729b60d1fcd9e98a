"""One optimizer step, the only one of the course: the loop runs it, and the planner on fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from tight_fit.techniques import preferences, references
from tight_fit.techniques.activation_offload import OffloadedActivations
from tight_fit.techniques.in_backward import updated_in_backward
from tight_fit.techniques.next_token import cross_entropy_sum, next_tokens
from tight_fit.techniques.precision import AUTOCAST, autocast
from tight_fit.techniques.precision import tensor_cores as tensor_cores  # where others look for it
from tight_fit.techniques.settings import RateSettings, StepSettings

Batch = dict[str, torch.Tensor]


def loss_sum(model: torch.nn.Module, batch: Batch, recipe: StepSettings) -> torch.Tensor:
    """Cross entropy summed over the labels of a micro-batch, an fp32 scalar.

    batch  the model's inputs, and "labels", int64 [labels]; of a language model [examples, tokens],
           the tokens themselves where the loss counts, else IGNORE
    The losses of task="dpo" and "grpo" are in `techniques.preferences`.
    """
    if recipe.task in references.TASKS:
        return preferences.loss_sum(model, batch, recipe)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with autocast(recipe, batch["labels"].device):
        logits = model(**inputs).logits
        if recipe.loss == "chunked":
            inner: Any = getattr(model, "module", model)  # DDP's
            head = inner.get_output_embeddings()  # a HeadInChunks
            return head.loss_sum(logits, next_tokens(batch["labels"]))
        if logits.dtype in AUTOCAST.values():
            logits = logits.float()  # a sum of losses overflows fp16
        return cross_entropy_sum(logits, batch["labels"])


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

    examples  in all micro-batches together (of a language model, labels that count). Each
              micro-batch's loss is a sum divided by this number, so that the gradient is that of
              the full batch, also when the last micro-batch or step of an epoch is smaller
    phase     is called with "forward", "backward" and "optimizer" as they begin
    scaler    of fp16 (`make_scaler`), kept from step to step. Gradients are unscaled once, before
              their norm is taken; a step whose gradients overflow changes nothing
    Raises ValueError for fp16 without a scaler.
    """
    scaler = _usable(scaler, recipe)
    total: torch.Tensor | float = 0.0
    early = recipe.optimizer_in_backward
    with updated_in_backward(model, optimizer) if early else nullcontext():
        for batch in micro_batches:
            phase("forward")
            moved = recipe.offload == "activations"
            with OffloadedActivations(model) if moved else nullcontext():
                loss = loss_sum(model, batch, recipe) / examples
            phase("backward")
            scaler.scale(loss).backward()
            total = total + loss.detach()
    phase("optimizer")
    if early:
        return torch.as_tensor(total)
    scaler.unscale_(optimizer)
    if recipe.max_grad_norm is not None:
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


def learning_rate(recipe: RateSettings, step: int) -> float:
    """Learning rate of step `step` (from 0): linear warm-up to the peak, then linear decay to 0."""
    warm_up = round(recipe.warmup * recipe.steps)
    if step < warm_up:
        return recipe.peak_learning_rate * (step + 1) / warm_up
    return recipe.peak_learning_rate * (recipe.steps - step) / max(1, recipe.steps - warm_up)

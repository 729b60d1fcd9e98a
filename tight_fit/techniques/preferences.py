"""Preference and reward tuning: the losses of DPO and GRPO, and the model they are compared with.

DPO, Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290), learns from pairs of answers of which
one is preferred. GRPO, Shao et al. 2024 (https://arxiv.org/abs/2402.03300), learns from the rewards
of answers that the model has written itself, compared within a group that answers one prompt.
Both compare the model with a reference, which is the model as it was before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tight_fit.checks import IGNORE
from tight_fit.techniques.next_token import next_tokens
from tight_fit.techniques.precision import AUTOCAST, autocast
from tight_fit.techniques.settings import StepSettings

BETA = {"dpo": 0.1, "grpo": 0.04}  # weight of the reference, as the papers have it
CLIP = 0.2  # how far a probability may move in one update of GRPO, as in PPO
SMALLEST = 1e-4  # added to the standard deviation of a group's rewards


def dpo_loss_sum(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The sum over pairs of −log σ(β × margin), a scalar.

    The margin is how much more the chosen answer has gained over the reference than the rejected.

    log_probs, reference  [2 × pairs], sums over the tokens of each answer, the chosen ones first
    """
    chosen, rejected = (log_probs - reference).chunk(2)
    return -F.logsigmoid(BETA["dpo"] * (chosen - rejected)).sum()


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """How much better each completion is than its group, in standard deviations, [completions].

    rewards  fp32 [completions], those of a group one after another, `group` of them
    """
    groups = rewards.view(-1, group)
    above = groups - groups.mean(1, keepdim=True)
    return (above / (groups.std(1, keepdim=True) + SMALLEST)).flatten()


def grpo_loss_sum(
    log_probs: torch.Tensor,
    counts: torch.Tensor,
    advantages: torch.Tensor,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over completions of the mean loss of their tokens, a scalar.

    log_probs   [completions, tokens]; `old` and `reference` alike, of the model that wrote them
                (None: this one) and of the reference (None: without one)
    counts      bool [completions, tokens], which tokens belong to the completion
    advantages  [completions] (`group_advantages`)
    """
    ratio = (log_probs - (log_probs.detach() if old is None else old)).exp()
    better = advantages[:, None]
    each = -torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better)
    if reference is not None:
        away = reference - log_probs
        each = each + BETA["grpo"] * (away.exp() - away - 1)
    return ((each * counts).sum(1) / counts.sum(1)).sum()


def loss_sum(model: Any, batch: dict[str, torch.Tensor], recipe: StepSettings) -> torch.Tensor:
    """The loss of a micro-batch, summed over its pairs (dpo) or completions (grpo).

    batch  the model's inputs; "labels" int64 [sequences, tokens], the last tokens of each sequence,
           IGNORE where they are no answer; "reference" fp32, where it was computed before, [2 ×
           pairs] or [completions, tokens]; of grpo "advantages" fp32 [completions]
    """
    own, reference = log_probs(model, batch, recipe), batch.get("reference")
    if recipe.task == "grpo":
        counts = next_tokens(batch["labels"]).view(own.shape) != IGNORE
        return grpo_loss_sum(own, counts, batch["advantages"], reference=reference)
    if reference is None:  # after the model's own pass, as TRL does it
        with torch.no_grad(), as_reference(model) as other:
            reference = log_probs(other, batch, recipe).sum(1)
    return dpo_loss_sum(own.sum(1), reference)


def log_probs(model: Any, batch: dict[str, torch.Tensor], recipe: StepSettings) -> torch.Tensor:
    """The logarithm of the probability of each next token, fp32 [sequences, tokens of labels].

    It is 0 where the next token is none that counts, as after the last one.
    """
    labels = batch["labels"]
    inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if labels.shape[1] < inputs["input_ids"].shape[1]:
        inputs["logits_to_keep"] = labels.shape[1]
    wanted = next_tokens(labels)
    with autocast(recipe, labels.device):
        logits = model(**inputs).logits
        if recipe.loss == "chunked":
            found = model.get_output_embeddings().log_probs(logits, wanted)
        else:
            if logits.dtype in AUTOCAST.values():
                logits = logits.float()
            logits = logits.flatten(0, -2)
            found = -F.cross_entropy(logits, wanted, reduction="none", ignore_index=IGNORE)
    return found.view(labels.shape)


@contextmanager
def as_reference(model: Any) -> Iterator[Any]:
    """Gives the reference: the model's own copy, or the model without its adapters inside."""
    if model.reference is not None:
        yield model.reference
        return
    with adapters_off(model), not_checkpointed(model):
        yield model


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, adapters of peft add nothing to the layers that they stand beside."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@contextmanager
def not_checkpointed(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is prepared for a backward pass that does not come."""
    name = "gradient_checkpointing"
    modules = [module for module in model.modules() if getattr(module, name, False) is True]
    for module in modules:
        setattr(module, name, False)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, name, True)


def without_dropout(model: nn.Module) -> None:
    """Switch dropout off, in place: as TRL does for DPO, so that both models see the same."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

"""The optimizers that a recipe may name, over all that trains, and the loss scaler of fp16."""

from __future__ import annotations

import torch
from torch import nn

from helpers.recipe import StepSettings

MOMENTUM = 0.9  # of SGD


def make_optimizer(model: nn.Module, recipe: StepSettings) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters of `model` that train.

    adamw      AdamW (Loshchilov and Hutter 2017), fused: one kernel, no temporaries; two fp32
               states per weight
    adamw8bit  AdamW with 8-bit states and one fp32 maximum per block of 256 (Dettmers et al. 2021,
               bitsandbytes); tensors under 4,096 elements keep fp32 states; with _embed32 all
               embeddings do
    sgd        with momentum 0.9, one state; its weight decay is part of the gradient
    adafactor  Shazeer and Stern 2018, torch.optim: per matrix one row and one column of second
               moments, no momentum
    lion       Chen et al. 2023, bitsandbytes: one state, a momentum; the update is the sign of its
               mixture with the gradient; lion8bit keeps the state in 8 bits
    Raises ModuleNotFoundError, in one sentence, where bitsandbytes is needed and missing.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr, weight_decay = recipe.peak_learning_rate, recipe.weight_decay
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=lr, weight_decay=weight_decay, fused=True)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(
            trained, lr=lr, weight_decay=weight_decay, momentum=MOMENTUM, fused=True
        )
    if recipe.optimizer == "adafactor":
        return torch.optim.Adafactor(trained, lr=lr, weight_decay=weight_decay, foreach=False)
    library = _bitsandbytes()
    kinds = {"lion": library.Lion, "lion8bit": library.Lion8bit}
    kind = kinds.get(recipe.optimizer, library.AdamW8bit)
    optimizer = kind(trained, lr=lr, weight_decay=weight_decay)
    # The library keeps overrides in one table for the whole process, by position in the optimizer:
    # those of one optimizer would reach the next. This one gets a table of its own.
    optimizer.mng = object.__new__(library.GlobalOptimManager)
    optimizer.mng.initialize()
    if recipe.optimizer == "adamw8bit_embed32":
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
    return optimizer


def _bitsandbytes():
    try:
        from bitsandbytes import optim
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "This optimizer is bitsandbytes' own, which is not installed: "
            "pip install bitsandbytes, or use optimizer='adamw'."
        ) from error
    return optim


def make_scaler(recipe: StepSettings, device: str | torch.device) -> torch.amp.GradScaler:
    """The loss scaler of fp16, from 2^16: halved when a gradient overflows, doubled after 2,000
    steps without.

    In every other precision it is switched off and lets everything through unchanged.
    """
    return torch.amp.GradScaler(torch.device(device).type, enabled=recipe.precision == "fp16")


def states(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
) -> list[torch.Tensor]:
    """Every tensor that optimizer and scaler keep from step to step."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    if scaler is not None and scaler.is_enabled():
        kept += [scaler._scale, scaler._growth_tracker]
    return [value for value in kept if isinstance(value, torch.Tensor)]

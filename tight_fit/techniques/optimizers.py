"""The optimizers that a recipe may name, over all that trains, and the loss scaler of fp16."""

from __future__ import annotations

import torch
from torch import nn

from tight_fit.optimizer_kinds import ADAMW, FOREACH, FUSED, KINDS
from tight_fit.techniques import library_optimizers
from tight_fit.techniques.host_optimizer import HostOptimizer
from tight_fit.techniques.muon import MuonWithAdamW, hidden_matrices
from tight_fit.techniques.settings import StepSettings
from tight_fit.techniques.stochastic_rounding import StochasticAdamW

MOMENTUM = 0.9  # of SGD


def make_optimizer(model: nn.Module, recipe: StepSettings) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters of `model` that train.

    With offload="optimizer" it is one over copies of them on the host (`HostOptimizer`).

    adamw      AdamW (Loshchilov and Hutter 2017), fused: one kernel, no temporaries; two fp32
               states per weight; adamw_foreach is PyTorch's default on a GPU, which makes a copy of
               the second moments of all weights in `step()`, and adamw_forloop takes one weight
               after another
    adamw8bit  AdamW with 8-bit states and one fp32 maximum per block of 256 (Dettmers et al. 2021,
               bitsandbytes); tensors under 4,096 elements keep fp32 states; with _embed32 all
               embeddings do
    sgd        with momentum 0.9, one state; its weight decay is part of the gradient
    adafactor  Shazeer and Stern 2018, torch.optim: per matrix one row and one column of second
               moments, no momentum
    lion       Chen et al. 2023, bitsandbytes: one state, a momentum; the update is the sign of its
               mixture with the gradient; lion8bit keeps the state in 8 bits
    paged_adamw8bit   the states of adamw8bit in memory that the driver moves between GPU and host
               (`library_optimizers`); adamw_stochastic   `stochastic_rounding.StochasticAdamW`
    muon       `muon.MuonWithAdamW`: one fp32 state per weight of hidden matrices
    Raises ModuleNotFoundError, in one sentence, where bitsandbytes is needed and missing.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if recipe.offload == "optimizer":
        return HostOptimizer(trained, lambda copies: _make(model, copies, recipe))
    return _make(model, trained, recipe)


def _make(
    model: nn.Module, trained: list[nn.Parameter], recipe: StepSettings
) -> torch.optim.Optimizer:
    lr, weight_decay = recipe.peak_learning_rate, recipe.weight_decay
    if recipe.optimizer in ADAMW:
        by = KINDS[recipe.optimizer].by
        return torch.optim.AdamW(
            trained, lr=lr, weight_decay=weight_decay, fused=by == FUSED, foreach=by == FOREACH
        )
    if recipe.optimizer == "muon":
        hidden = hidden_matrices(model, trained)
        kept = {id(parameter) for parameter in hidden}
        rest = [parameter for parameter in trained if id(parameter) not in kept]
        return MuonWithAdamW(hidden, rest, lr=lr, weight_decay=weight_decay)
    if recipe.optimizer == "sgd":
        sgd = torch.optim.SGD(
            trained, lr=lr, weight_decay=weight_decay, momentum=MOMENTUM, fused=True
        )
        if recipe.precision == "fp16":
            sgd.register_step_pre_hook(_begin_at_zero)
        return sgd
    if recipe.optimizer == "adafactor":
        return torch.optim.Adafactor(trained, lr=lr, weight_decay=weight_decay, foreach=False)
    if recipe.optimizer == "adamw_stochastic":
        return StochasticAdamW(trained, lr=lr, weight_decay=weight_decay)
    return library_optimizers.make(model, trained, recipe)


def _begin_at_zero(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Give fused SGD momenta of zero before its first step.

    PyTorch makes them without values, and fills them in the first step, which a scaler skips where
    a gradient overflowed: later steps would go on from what lay in that memory.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)


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

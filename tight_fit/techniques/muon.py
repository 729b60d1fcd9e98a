"""Muon for the matrices of the hidden layers, and AdamW for all else, as one optimizer.

Muon (Jordan et al. 2024) makes the momentum of a matrix nearly orthogonal by five steps of Newton
and Schulz in bf16. It is for hidden matrices: embeddings, the output layer or a new head, biases
and norms go to AdamW (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2,
https://arxiv.org/abs/2502.16982, whose scale of the learning rate suits both).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MATCHED = "match_rms_adamw"  # Muon's updates are as large as AdamW's, so that one rate serves both


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` over `hidden`, matrices, and fused AdamW over `rest`.

    Both read their settings from this one's `param_groups`, and keep their states in its `state`.
    """

    def __init__(
        self,
        hidden: list[nn.Parameter],
        rest: list[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
    ):
        parts: list[torch.optim.Optimizer] = []
        if hidden:
            parts.append(torch.optim.Muon(hidden, lr, weight_decay, adjust_lr_fn=MATCHED))
        if rest:
            parts.append(torch.optim.AdamW(rest, lr, weight_decay=weight_decay, fused=True))
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss is returned
        """One update of all parameters that have a gradient."""
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state  # loading replaces both
            part.step()


def hidden_matrices(model: nn.Module, trained: list[nn.Parameter]) -> list[nn.Parameter]:
    """Those of `trained` that are matrices of hidden layers of a model.

    They have two dimensions, are no embedding, and are below the head: what a model of transformers
    has outside its `base_model`.
    """
    left = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        prefix = getattr(module, "base_model_prefix", "")
        base = getattr(module, prefix, None) if prefix else None
        if isinstance(base, nn.Module) and base is not module:
            below = {id(parameter) for parameter in base.parameters()}
            left |= {
                id(parameter) for parameter in module.parameters() if id(parameter) not in below
            }
            break
    return [each for each in trained if each.ndim == 2 and id(each) not in left]

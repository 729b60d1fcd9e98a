"""The optimizer's update inside the backward pass, a parameter at a time.

As soon as a parameter's gradient is complete the parameter is updated, and the gradient is freed.
At no moment do the gradients of all parameters exist (PyTorch tutorial "How to save memory by
fusing the optimizer step into the backward pass", 2023; LOMO, Lv et al. 2023,
https://arxiv.org/abs/2306.09782).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def updated_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, `backward` updates each parameter of `model` that trains, and leaves no gradient.

    Nobody sees all gradients together: they cannot be clipped by their common norm, unscaled, or
    added up over micro-batches.
    """

    def update(parameter: torch.Tensor) -> None:
        optimizer.step()  # no other parameter has a gradient now
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(update)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

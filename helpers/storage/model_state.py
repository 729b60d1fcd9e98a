"""A model's saved weights: whether they are this model's, and putting them into it.

The scales of weights in 4 bits are in a model's `state_dict` and cannot be loaded from one. They
are made with the model, from the same weights, so they must be equal already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def different(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the model's tensors that `tensors` lacks or has in another form.

    tensors  a saved state's: "model." and the tensor's name
    """
    own, fixed, wrong = model.state_dict(), _made_with(model), []
    for name, value in own.items():
        held = tensors.get(f"model.{name}")
        if held is None or (held.shape, held.dtype) != (value.shape, value.dtype):
            wrong.append(name)
        elif name in fixed and not torch.equal(held, value.cpu()):
            wrong.append(name)
    return wrong


def put(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the saved weights into the model, in place."""
    names = model.state_dict().keys() - _made_with(model)
    model.load_state_dict({name: tensors[f"model.{name}"] for name in names}, strict=False)


def _made_with(model: nn.Module) -> set[str]:
    """What is no parameter and no buffer, under any of its names."""
    filled = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    filled |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return set(model.state_dict().keys() - filled)

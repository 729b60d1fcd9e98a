"""Models and tensors that were there before a cell is planned, with values, on a GPU or not.

In the copy of the process in which the cell is planned each of them gets the place of its twin: the
same shape, dtype and place, and no values where they are parameters.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from tight_fit.script.sandbox import NotPlanned
from tight_fit.torch_private import FakeTensor


def lay_out(names: dict[str, Any]) -> None:
    """Replace real parameters by ones without values, and tensors on a GPU by planned ones.

    names  of the notebook; tensors in them, and in lists and dictionaries among them, are replaced
    Call it while the modes of a plan are on.
    """
    twins: dict[int, torch.Tensor] = {}
    for module in _all(nn.Module):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not isinstance(parameter, FakeTensor):
                module._parameters[name] = _twin(parameter, twins)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_cuda:
                module._buffers[name] = _on_gpu(buffer)
    for optimizer in _all(torch.optim.Optimizer):
        _lay_out_optimizer(optimizer, twins)
    for name, value in list(names.items()):
        if not name.startswith("_"):
            names[name] = _replaced(value, twins)


def _all(kind: type) -> list[Any]:
    """What there is of a kind; what only says so by its `__class__` is not."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _twin(parameter: torch.Tensor, twins: dict[int, torch.Tensor]) -> torch.Tensor:
    """The parameter without values; one that is shared has one twin."""
    if id(parameter) not in twins:
        if type(parameter) is not nn.Parameter:
            raise NotPlanned(
                f"uses a {type(parameter).__name__} of an earlier cell: make the model in the cell "
                "that is planned"
            )
        twin: torch.Tensor = nn.Parameter(_without(parameter), parameter.requires_grad)
        if parameter.is_cuda:
            twin.data = twin.data.cuda()
        if parameter.grad is not None:
            twin.grad = _placed(parameter.grad)
        twins[id(parameter)] = twin
    return twins[id(parameter)]


def _without(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the same shape on the host, which nobody writes to."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return _without(tensor).cuda()


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    return _on_gpu(tensor) if tensor.is_cuda else _without(tensor)


def _lay_out_optimizer(optimizer: Any, twins: dict[int, torch.Tensor]) -> None:
    """Let an optimizer update the twins, with states of the same sizes."""
    state = {}
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if isinstance(parameter, FakeTensor):
                continue
            twin = _twin(parameter, twins)
            group["params"][place] = twin
            if parameter in optimizer.state:
                state[twin] = {
                    name: _state(value, twin) if isinstance(value, torch.Tensor) else value
                    for name, value in optimizer.state[parameter].items()
                }
    optimizer.state.clear()
    optimizer.state.update(state)


def _state(value: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """A state's twin; numbers, such as the count of steps, keep their values."""
    if value.is_cuda:
        return _on_gpu(value)
    return value if value.dim() == 0 else torch.zeros_like(twin).new_empty(value.shape)


def _replaced(value: Any, twins: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, nn.Parameter) and not isinstance(value, FakeTensor):
        return _twin(value, twins)
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.is_cuda:
        return _on_gpu(value)
    if type(value) is list:
        return [_replaced(part, twins) for part in value]
    if type(value) is dict:
        return {name: _replaced(part, twins) for name, part in value.items()}
    return value

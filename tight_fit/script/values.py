"""What hands a program's tensors to Python, and how a GPU's are copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tight_fit.torch_private import FakeTensor
from tight_fit.trace.cuda_kernels import computed_in
from tight_fit.trace.gpu_calls import GPUCalls, Places
from tight_fit.trace.known_values import ALL_VALUES, KnownValues, handed_over, with_numbers


class NotFollowed(RuntimeError):
    """What comes after the training is followed no further; the message says why."""


class ScriptCalls(GPUCalls):
    """`GPUCalls`, and the calls of a tensor that hand all of its values to Python or NumPy.

    take  is told of each GPU that a call names
    """

    def __init__(
        self,
        places: Places,
        known: KnownValues,
        active: bool,
        flash: bool = True,
        take: Callable[[Any], None] = lambda device: None,
    ):
        super().__init__(places, flash)
        self.known, self.names_gpus, self.take = known, active, take
        self.attention: dict[str, bool] = {}  # dtype -> whether one kernel computed it

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in ALL_VALUES and isinstance(args[0], FakeTensor):
            return handed_over(self.known, function, args, kwargs)
        if function is torch.tensor:
            args = with_numbers(args)
        if function is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return copied(*args)
        if function is torch.Tensor.__format__ and isinstance(args[0], FakeTensor):
            one = args[0].dim() == 0  # f"{loss:.3f}": torch formats numbers of no other class
            return format(args[0].item() if one else args[0], *args[1:])
        if not self.names_gpus:
            return function(*args, **kwargs)
        if function is torch.Tensor.cuda:
            self.take(args[1] if len(args) > 1 else kwargs.get("device"))
        return super().__torch_function__(function, types, args, kwargs)

    def _is_fused(self, query, *args, **kwargs):
        fused = super()._is_fused(query, *args, **kwargs)
        if torch.is_grad_enabled():
            self.attention[str(computed_in(query)).removeprefix("torch.")] = fused
        return fused

    def _is_gpu(self, device):
        on_gpu = super()._is_gpu(device)
        if on_gpu:
            self.take(device)
        return on_gpu


def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A deep copy, made by an operation, so that the tracker sees it."""
    if id(tensor) not in memo:
        copy = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        else:
            copy.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            copy.grad = copied(tensor.grad, memo)
        memo[id(tensor)] = copy
    return memo[id(tensor)]

"""PyTorch's mode for tensors without values, which finds sooner what it remembers of operations."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import unwrap
from typing import Self

import torch

from tight_fit.torch_private import (
    FakeTensor,
    PlainDispatchMode,
    TorchFakeTensorMode,
    start_autograd,
)

_NUMBERS = {int, float, bool, type(None), torch.dtype, torch.device, torch.layout}
_NUMBERS |= {torch.memory_format, str}


class FakeTensorMode(TorchFakeTensorMode, PlainDispatchMode):
    """PyTorch's mode for tensors without values, after which a process can still be copied.

    Autograd starts a thread for each GPU at the first backward pass, and gradients are computed in
    no copy of a process that has such threads. Where PyTorch is built for CUDA and no GPU is there,
    its mode replaces the count of GPUs, 0, by a pretended one, for the rest of the process; so
    autograd counts them here before. What it remembers of operations is found by a key of its own.
    """

    # Neither hidden nor counted.
    __torch_dispatch__ = unwrap(TorchFakeTensorMode.__torch_dispatch__)

    def __enter__(self) -> Self:
        start_autograd()
        return super().__enter__()

    def _prep_args_for_hash(self, result, args, state, id_hashed_objects):
        """Add to `result` all that decides what an operation on `args` makes, as PyTorch does.

        PyTorch's own key looks at each number of each shape, which takes longer.
        """
        if self.shape_env is not None or isinstance(args, Mapping):
            return super()._prep_args_for_hash(result, args, state, id_hashed_objects)
        if isinstance(args, (list, tuple)):
            result += (type(args), len(args))
        for value in args:
            kind = type(value)
            if kind is FakeTensor:
                described = _described(self, value)
                if described is None:  # PyTorch says why nothing is kept of it
                    super()._prep_args_for_hash(result, (value,), state, id_hashed_objects)
                result.append(described)
            elif kind in _NUMBERS:
                result += (kind, value)
            elif kind in (list, tuple, torch.Size):
                self._prep_args_for_hash(result, value, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, (value,), state, id_hashed_objects)
        return None


def _described(mode: FakeTensorMode, tensor: FakeTensor) -> tuple | None:
    """What of a strided tensor decides the results of operations; None for other tensors."""
    if tensor.fake_mode is not mode or tensor.constant is not None:
        return None
    if tensor.layout is not torch.strided:
        return None
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )

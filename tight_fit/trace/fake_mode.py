"""PyTorch's mode for tensors without values, which finds sooner what it remembers of operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tight_fit import torch_private
from tight_fit.torch_private import FakeTensor

_NUMBERS = {int, float, bool, type(None), torch.dtype, torch.device, torch.layout}
_NUMBERS |= {torch.memory_format, str}


class FakeTensorMode(torch_private.FakeTensorMode):
    """The mode with a key of its own for what is remembered."""

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

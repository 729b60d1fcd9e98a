"""What makes a training step run on tensors that have shapes and no values (`FakeTensorMode`)."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from helpers.torch_private import (
    TRUNCATED_NORMAL,
    FakeTensor,
    TorchDispatchMode,
    tree_leaves,
    unset_fake_temporarily,
)

# Without this torch would run them on real tensors of the same sizes (it has no other implementation).
IN_PLACE = {torch.ops.aten._fused_sgd_.default, torch.ops.aten._fused_sgd_.tensor_lr}
GROUPED_MM = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
WEIGHT_OF = {
    torch.ops.aten.native_layer_norm.default: 2,
    torch.ops.aten.native_batch_norm.default: 1,
}  # its argument


class FakeValues(TorchDispatchMode):
    """For tensors without values: whoever asks for one (`.item()`) is told 1. What depends on it is a rate or a size of
    a step, or whether a mask is all ones, seldom a shape. An update in place that torch cannot do without values is left
    out: it makes nothing new. So is the initializer that draws until all values are within bounds, which would never end."""

    def __enter__(self):
        self._drawing = patch.object(
            *TRUNCATED_NORMAL,
            lambda tensor, *rest, **named: tensor,
            create=True,
        )  # it is torch's own affair, and may go by another name
        self._drawing.start()
        return super().__enter__()

    def __exit__(self, *exception):
        self._drawing.stop()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on what it wraps come by
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(
            args[0], FakeTensor
        ):
            return 1.0 if args[0].is_floating_point() else 1
        if function in IN_PLACE:
            return None
        if function is GROUPED_MM:
            return _grouped_mm(*args, **(kwargs or {}))
        if function is LAYER_NORM_BACKWARD and args[0].stride() != args[1].stride():
            args = (
                torch.empty_like(args[1]),
                *args[1:],
            )  # real kernels answer in the input's layout
        out = function(*args, **(kwargs or {}))
        if (
            function in WEIGHT_OF and args[WEIGHT_OF[function]] is not None
        ):  # real kernels keep statistics in its type
            kept = args[WEIGHT_OF[function]].dtype
            out = (
                out[0],
                *(
                    part if part.dtype == kept else torch.empty_like(part, dtype=kept)
                    for part in out[1:]
                ),
            )
        return out


def _grouped_mm(left, right, offsets=None, bias=None, out_dtype=None):
    """The product of experts, as large whichever rows each one gets: torch's rule of shapes takes bf16 alone, its kernels
    any type. Rows of the result begin at multiples of 16 bytes."""
    if left.dim() == right.dim() == 2:
        sizes = len(offsets), left.shape[0], right.shape[1]
    elif left.dim() == 2:
        sizes = left.shape[0], right.shape[2]
    else:
        sizes = (
            (left.shape[1], right.shape[1])
            if right.dim() == 2
            else (left.shape[0], left.shape[1], right.shape[2])
        )
    dtype = out_dtype or left.dtype
    whole = 16 // dtype.itemsize
    width = -(-sizes[-1] // whole) * whole
    return left.new_empty_strided(sizes, (sizes[-2] * width, width, 1)[-len(sizes) :], dtype=dtype)


class NeverSkipScaler(torch.amp.GradScaler):
    """A scaler that never skips: on tensors without values nobody can ask whether a gradient overflowed."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)


class Indices(TorchDispatchMode):
    """Lists of indices keep their values, also among tensors without: DDP reads one when it lays its buckets anew, and
    a grid of ranks looks for itself in one."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [
            value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        ]
        if kwargs.get("dtype") == torch.int32 or (tensors and all(map(_real_index, tensors))):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _real_index(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_floating_point()

"""What a training step needs to run on fake tensors, which have shapes and no values.

PyTorch makes such tensors inside `FakeTensorMode`. The modes here answer what only values could
answer, and follow the real kernels where PyTorch's rules of shapes differ from them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tight_fit.torch_private import (
    DEVICE_OF,
    TRUNCATED_NORMAL,
    FakeTensor,
    PlainDispatchMode,
    as_parameter,
    disable_current_modes,
    fake_of,
    tree_leaves,
    unset_fake_temporarily,
)

aten = torch.ops.aten

# Updates in place that have no rule for fake tensors: PyTorch would run them on real tensors of the
# same sizes. They allocate nothing, so they are left out.
# Adam's have one, which reads the sizes of all tensors of a model for nothing.
IN_PLACE = {
    getattr(getattr(aten, name), overload)
    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")
    for overload in ("default", "tensor_lr")
}
# Those of bitsandbytes have one, which only looks at dtypes, for each tensor of a model.
IN_PLACE_OF_LIBRARIES = {
    f"bitsandbytes::optimizer_update_{bits}" for bits in ("8bit_blockwise", "32bit")
}
# One operation for a whole loss, from PyTorch 2.13 on: on fake tensors it makes its results alone.
CHUNKED_LOSS = "torch_nn::_linear_cross_entropy_batch_chunked"
GROUPED_MM = aten._grouped_mm.default
LAYER_NORM_BACKWARD = aten.native_layer_norm_backward.default
WEIGHT_POSITION = {  # normalization -> which of its arguments is the weight
    aten.native_layer_norm.default: 2,
    aten.native_batch_norm.default: 1,
}
# A draw of one number that is compared with a probability: {comparison: in Python}.
COMPARED = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
}
DRAWN = 1 - 2**-24  # the largest number that `torch.rand` gives
ALIGNMENT = 16  # bytes; each row in the result of a grouped product begins at a multiple of it


class FakeValues(PlainDispatchMode):
    """Lets code run on fake tensors that asks for values.

    A request for one value (`.item()`) is answered with 1. Such a value is a learning rate, the
    number of a step, or whether a mask is all ones; it seldom decides a shape. A single random
    number that is compared with a probability is `DRAWN`: so models decide which layers a step
    leaves out (LayerDrop), and the step that has all of them takes most. Results get the layout and
    dtype that the real kernels give them. Use it inside `FakeTensorMode`.
    """

    def __enter__(self):
        self._patches = alike_each_time()
        self._patches.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        self._patches.__exit__(*exception)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on the local tensor arrive here by themselves
        if function is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            answer = getattr(args[0], "answer", 1)
            return float(answer) if args[0].is_floating_point() else answer
        name = function.name()
        if function in IN_PLACE or name in IN_PLACE_OF_LIBRARIES:
            return None
        if name.startswith(CHUNKED_LOSS):
            raise NotImplementedError(
                "torch.nn.functional.linear_cross_entropy with options computes in chunks that a "
                "plan does not see: leave out `options`, or take the loss in chunks of "
                "tight_fit.techniques.chunked_loss, which does the same."
            )
        if function is GROUPED_MM:
            return _grouped_mm(*args, **(kwargs or {}))
        if function is aten.histc.default and not args[0].is_floating_point():
            # Counts the tokens of each expert. PyTorch has no rule of shapes for it, and would run
            # the CPU's kernel, which has no whole numbers.
            return args[0].new_empty((kwargs or {}).get("bins", 100) if len(args) < 2 else args[1])
        if function is LAYER_NORM_BACKWARD and not args[0].is_contiguous():
            # The real kernels make both contiguous, and so is their result.
            whole = torch.empty_like(args[0], memory_format=torch.contiguous_format)
            args = (whole, *args[1:])
        result = function(*args, **(kwargs or {}))
        if function is aten.rand.default and not args[0]:
            result.answer = DRAWN
        elif function in COMPARED and hasattr(args[0], "answer"):
            result.answer = COMPARED[function](args[0].answer, args[1])
        if function in WEIGHT_POSITION:
            return _with_statistics_like(args[WEIGHT_POSITION[function]], result)
        return result


@contextmanager
def alike_each_time() -> Iterator[None]:
    """Inside, `torch.nn.init.trunc_normal_` leaves its tensor, and TorchScript optimizes nothing.

    PyTorch draws again until every value is within the bounds. On fake tensors that would never
    end. The function is private, so it may get another name; then this patch has no effect.
    TorchScript rewrites a function after its first calls and then frees small tensors at other
    moments, so that a second plan of a model that has such functions (DeBERTa in transformers
    5.17) would not be the first.
    """

    def unchanged(tensor, *args, **kwargs):
        return tensor

    as_written = torch.jit.optimized_execution(False)
    with patch.object(*TRUNCATED_NORMAL, unchanged, create=True), as_written:
        yield


def _with_statistics_like(weight: torch.Tensor | None, result: tuple) -> tuple:
    """The result of a normalization; real kernels keep its statistics in the weight's dtype."""
    if weight is None:
        return result
    output, *statistics = result
    return output, *(
        part if part.dtype == weight.dtype else torch.empty_like(part, dtype=weight.dtype)
        for part in statistics
    )


def _grouped_mm(left, right, offsets=None, bias=None, out_dtype=None):
    """The result of the matrix products of all experts, whichever tokens each expert gets.

    PyTorch's rule of shapes takes only bf16, its kernels take any dtype. Each row of the result
    begins at a multiple of `ALIGNMENT` bytes.
    """
    shape: tuple[int, ...]
    if left.dim() == right.dim() == 2:
        shape = len(offsets), left.shape[0], right.shape[1]
    elif left.dim() == 2:
        shape = left.shape[0], right.shape[2]
    elif right.dim() == 2:
        shape = left.shape[1], right.shape[1]
    else:
        shape = left.shape[0], left.shape[1], right.shape[2]
    dtype = out_dtype or left.dtype
    unit = ALIGNMENT // dtype.itemsize
    row = -(-shape[-1] // unit) * unit
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return left.new_empty_strided(shape, strides, dtype=dtype)


class NeverSkipScaler(torch.amp.GradScaler):
    """A gradient scaler that never skips a step: fake gradients have no values to overflow."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)


class Indices(PlainDispatchMode):
    """Keeps the values of lists of indices while all other tensors are fake.

    DDP reads such a list when it rebuilds its buckets, and a device mesh finds its own rank in one.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if kwargs.get("dtype") == torch.int32 or (tensors and all(map(_is_real_index, tensors))):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _is_real_index(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_floating_point()


def leave_meta(model: nn.Module, widen: bool) -> None:
    """Replace each parameter and buffer on the meta device by a fake tensor of its shape, in place.

    The fake ones have the storages of those on the meta device, so what shared one shares it still.

    widen  half-precision ones become fp32
    """
    made: Any = torch.empty(0)
    mode = made.fake_mode
    replaced: dict[torch.Tensor, torch.Tensor] = {}  # tied ones are replaced once

    def replacement(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in replaced:
            wider = widen and tensor.dtype in (torch.float16, torch.bfloat16)
            dtype, new = torch.float32 if wider else tensor.dtype, tensor
            if wider or tensor.device.type != "meta":
                with disable_current_modes():
                    new = torch.empty(tensor.shape, dtype=dtype, device="meta")
                    new.requires_grad_(tensor.requires_grad)
            fake = fake_of(mode, new)
            replaced[tensor] = as_parameter(fake) if isinstance(tensor, nn.Parameter) else fake
        return replaced[tensor]

    for module in model.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = replacement(tensor)

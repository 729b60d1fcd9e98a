"""FP8: the matrix products of linear layers in 8 bits, as torchao's float8 training has them.

Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433) multiply numbers of 8 bits: E4M3, with 3
bits of mantissa and up to 448, for activations and weights, and E5M2, with 2 bits and up to 57,344,
for gradients. Both operands are scaled first, so that the largest number becomes the largest of the
format: one scale for a tensor ("tensorwise"), or one for each row of a sum ("rowwise", where
gradients are E4M3 and scales are powers of two). Weights, their gradients, the optimizer's states
and what is kept for the backward pass stay as they were.

The values are those of torchao 0.18's `convert_to_float8_training` with the recipe of the same name
(float8/float8_linear.py), bit for bit, which a test compares. There a cast is many kernels unless
torch.compile fuses them, and without it torchao is slower than bf16. Here a cast is what remains of
it then: one operation finds the largest number and its scale, and one writes the scaled numbers, in
the order in which the product wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tight_fit.torch_private import scaled_mm

E4M3 = torch.float8_e4m3fn
MULTIPLE = 16  # of which all sizes of a product must be multiples on a GPU
LEAST = 1e-12  # the largest number of a tensor of zeros counts as this


def layers_of(model: nn.Module) -> dict[str, nn.Linear]:
    """{name: layer} of the linear layers that multiply in 8 bits: those of the stacked layers.

    Embeddings, poolers, heads and layers whose sizes are no multiples of 16 stay as they are.
    Raises ValueError where none is left.
    """
    stacks = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    )
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name.startswith(stacks)
        and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
    }
    if not found:
        raise ValueError(
            f"float8 changes linear layers of stacked layers whose sizes are multiples of "
            f"{MULTIPLE}, and {type(model).__name__} has none: leave float8 out."
        )
    return found


def multiply_in_8_bits(model: nn.Module, scaling: str) -> None:
    """Let the layers of `layers_of` multiply in 8 bits, in place; their parameters stay the same.

    scaling  one of `rules.SCALINGS`
    Raises what `layers_of` raises.
    """
    for name, layer in layers_of(model).items():
        new = Linear8bit(layer.in_features, layer.out_features, False, "meta")
        new.weight, new.bias, new.scaling = layer.weight, layer.bias, scaling
        model.set_submodule(name, new)


class Linear8bit(nn.Linear):
    """A linear layer whose three products are in 8 bits.

    x [..., inputs]; computed and returned in the dtype of autocast where it is on, else in that of
    x. Raises ValueError where gradients are wanted and the rows of x are no multiple of 16, which a
    GPU asks for.
    """

    scaling: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        rows = x.numel() // x.shape[-1]
        if rows % MULTIPLE and torch.is_grad_enabled():  # the weight's gradient sums over them
            raise ValueError(
                f"float8 multiplies {rows} rows (examples × tokens of a micro-batch), and a GPU "
                f"asks for a multiple of {MULTIPLE}: use another batch size or length."
            )
        with torch.autocast(kind, enabled=False):  # a CPU computes these products by others
            y = Product8bit.apply(x, self.weight.t(), self.scaling)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class Product8bit(torch.autograd.Function):
    """x W with both in 8 bits, and its two gradients.

    x [..., inputs] and W [inputs, outputs] in 16 or 32 bits, and kept so for the backward pass.
    """

    @staticmethod
    def forward(ctx, x, weight, scaling):
        product, known = product_of(x, weight, scaling)
        ctx.save_for_backward(x, weight, *known)
        ctx.scaling = scaling
        return product

    @staticmethod
    def backward(ctx, gradient):
        x, weight, *known = ctx.saved_tensors
        return *gradients_of(gradient, x, weight, ctx.scaling, known), None


def product_of(
    x: torch.Tensor, weight: torch.Tensor, scaling: str
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(x W, the scales and their inverses that the backward pass takes again)."""
    rows = x.flatten(0, -2)
    tensorwise = scaling == "tensorwise"
    of_x = scales(rows, E4M3, None if tensorwise else 1)
    of_weight = scales(weight, E4M3, None if tensorwise else 0)
    left, right = cast(rows, of_x[0]), cast(weight, of_weight[0], turned=True)
    product = scaled_mm(left, right.t(), of_x[1], of_weight[1], x.dtype, True)
    known = (*of_x, *of_weight) if tensorwise else ()
    return product.view(*x.shape[:-1], weight.shape[1]), known


def gradients_of(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scaling: str,
    known: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and W; `known` as `product_of` returns them, or nothing."""
    rows, of_rows = x.flatten(0, -2), gradient.flatten(0, -2)
    if scaling == "tensorwise":
        low = torch.float8_e5m2
        of_x, of_weight = (known[:2], known[2:]) if known else (scales(rows), scales(weight))
        first = second = scales(of_rows, low)
    else:
        low = E4M3
        first, second = scales(of_rows, low, 1), scales(of_rows, low, 0)
        of_x, of_weight = scales(rows, low, 0), scales(weight, low, 1)
    left, right = cast(of_rows, first[0], low), cast(weight, of_weight[0])
    for_x = _rescaled(left, right.t(), first[1], of_weight[1].t(), gradient.dtype)
    left, right = cast(of_rows, second[0], low, turned=True), cast(rows, of_x[0], turned=True)
    for_weight = _rescaled(left, right.t(), second[1].t(), of_x[1], gradient.dtype)
    return for_x.view(x.shape), for_weight.t()


def _rescaled(
    left: torch.Tensor,
    right: torch.Tensor,
    inverse_left: torch.Tensor,
    inverse_right: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A product of gradients. Those of rows are multiplied as if nothing were scaled and unscaled
    after it, as GPUs have no fast kernel for both (torchao, float8/float8_ops.py)."""
    if not inverse_left.dim():
        return scaled_mm(left, right, inverse_left, inverse_right, dtype, False)
    one = inverse_left.new_ones(())
    return scaled_mm(left, right, one, one, dtype, False).mul_(inverse_left).mul_(inverse_right)


@torch.library.custom_op("tight_fit::float8_product", mutates_args=())
def whole_product(x: torch.Tensor, weight: torch.Tensor, scaling: str) -> torch.Tensor:
    """What `Product8bit` computes, as one operation: a plan's graph holds no autograd.Function."""
    return product_of(x, weight, scaling)[0]


@whole_product.register_fake
def _(x, weight, scaling):
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.scaling = inputs[2]


def _gradients(ctx, gradient):
    x, weight = ctx.saved_tensors
    return *gradients_of(gradient, x, weight, ctx.scaling), None


whole_product.register_autograd(_gradients, setup_context=_keep)
WHOLE = torch.ops.tight_fit.float8_product.default
DECOMPOSED = {WHOLE: lambda *given: product_of(*given)[0]}  # what a compiler puts in its place,
PRODUCT = torch.ops.aten._scaled_mm.default  # of which this multiplies,
LARGEST = torch.ops.aten.amax.default  # and this decides the scales


def scales(
    numbers: torch.Tensor, dtype: torch.dtype = E4M3, axis: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What takes the largest absolute number to the largest of an 8-bit dtype, and its inverse.

    fp32 scalars for a matrix, [rows, columns]; with an axis, over which is looked, [rows, 1] or
    [1, columns], and powers of two. One operation, as torch.compile has one kernel for it, which
    gets what it consists of.
    """
    return (_scales if torch.compiler.is_compiling() else _as_one)(numbers, dtype, axis)


def _scales(
    numbers: torch.Tensor, dtype: torch.dtype, axis: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    largest: Any = numbers.abs().amax(() if axis is None else axis, axis is not None)
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=LEAST)).float()
    if axis is not None:
        scale = scale.log2().floor().exp2()
    return scale, scale.reciprocal()


_as_one = torch.library.custom_op("tight_fit::float8_scales", _scales, mutates_args=())


@_as_one.register_fake
def _(numbers, dtype, axis=None):
    shape = (
        [] if axis is None else [1 if i == axis else size for i, size in enumerate(numbers.shape)]
    )
    return tuple(numbers.new_empty(shape, dtype=torch.float32) for _ in range(2))


def cast(
    numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = E4M3, turned: bool = False
) -> torch.Tensor:
    """A scaled matrix in 8 bits, contiguous, transposed if `turned`: multiplied in fp32, written in
    one pass."""
    if torch.compiler.is_compiling():
        low = (numbers.float() * scale).to(dtype)
        return (low.t() if turned else low).contiguous()
    if turned:
        numbers, scale = numbers.t(), scale.t()
    out = numbers.new_empty(numbers.shape, dtype=dtype)
    # A scale with a dimension makes the product fp32 where the numbers are in 16 bits.
    return torch.mul(numbers, scale.reshape(1, 1) if not scale.dim() else scale, out=out)

"""The kernels that multiply matrices: products, fused attention, convolutions."""

from __future__ import annotations

from math import prod

import torch

from tight_fit.kernels.op import Op
from tight_fit.kernels.sizes import arithmetic, tensors, touched


def product(name, args, kwargs, out) -> list[Op] | None:
    """A matrix product, also with a sum; None where an operand is a vector, which is no product."""
    left, right = (args[1], args[2]) if name.startswith(("add", "badd")) else (args[0], args[1])
    if left.dim() < 2 or right.dim() < 1:
        return None
    m, k = left.shape[-2:]
    n = right.shape[-1] if right.dim() > 1 else 1
    batch = prod(left.shape[:-2])
    layout = ("n" if right.dim() < 2 or right.stride(-1) == 1 else "t") + (
        "n" if left.stride(-1) == 1 else "t"
    )
    read = touched(left) + touched(right) + (touched(args[0]) if left is not args[0] else 0)
    return [
        Op(
            name,
            "matmul",
            arithmetic(left),
            2 * batch * m * n * k,
            read,
            touched(out),
            (batch, m, n, k),
            layout,
        )
    ]


def grouped_product(name, args, kwargs, out) -> list[Op]:
    """The matrix products of all experts in one kernel, as a product with a batch of experts: the
    rows, columns or terms that the groups divide are taken to be divided evenly."""
    left, right = args[:2]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = left.shape[0] if offsets is None else offsets.shape[0]
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    flops = 2 * m * k * n * (groups if left.dim() == right.dim() == 3 else 1)
    if left.dim() == right.dim() == 2:
        k = -(-k // groups)
    elif left.dim() == 2:
        m = -(-m // groups)
    elif right.dim() == 2:
        n = -(-n // groups)
    layout = ("n" if right.stride(-1) == 1 else "t") + ("n" if left.stride(-1) == 1 else "t")
    read = touched(left) + touched(right)
    shape = (groups, m, n, k)
    return [Op(name, "matmul", arithmetic(left), flops, read, touched(out), shape, layout)]


def attention(name, args, kwargs, out) -> list[Op] | None:
    """PyTorch's fused attention (flash, Dao et al. 2022; memory-efficient, Rabe and Staats 2021):
    products stay on the chip."""
    back = name.endswith("backward")
    given = tensors(args)
    query, key, value = given[1:4] if back else given[:3]
    causal = any(value is True for value in args[3:]) or kwargs.get("is_causal", False)
    heads, queries, keys, width = (
        prod(query.shape[:-2]),
        query.shape[-2],
        key.shape[-2],
        query.shape[-1],
    )
    products = 5 if back else 2
    flops = 2 * products * heads * queries * keys * (width + value.shape[-1]) // 2
    read = sum(map(touched, given)) + sum(map(touched, tensors(kwargs)))
    results = tensors(out)
    return [
        Op(
            name,
            "attention",
            arithmetic(query),
            flops // 2 if causal else flops,
            read,
            sum(map(touched, results)),
            (heads, queries, keys, width),
            "causal" if causal else "",
        )
    ]


def convolution(name, args, kwargs, out) -> list[Op]:
    """A convolution, or the kernels of its backward pass: one for each gradient that is asked."""
    if name == "convolution_backward":
        return _convolution_backward(args)
    return [
        _one_convolution(
            name,
            args[0],
            args[1],
            out,
            args[8] if len(args) > 8 else 1,
            args[6] if len(args) > 6 else False,
        )
    ]


def _convolution_backward(args) -> list[Op]:
    gradient, source, weight, _, _, _, _, transposed, _, groups, wanted = args[:11]
    kernels = []
    if wanted[0]:
        kernels.append(
            _one_convolution(
                "convolution_backward", source, weight, gradient, groups, transposed, swap=True
            )
        )
    if wanted[1]:
        op = _one_convolution("convolution_backward", source, weight, gradient, groups, transposed)
        batch, m, n, k = op.shape
        kernels.append(
            op._replace(
                shape=(batch, n, k, m),
                read=touched(source) + touched(gradient),
                written=touched(weight),
                layout=op.layout + "/weights",
            )
        )
    if wanted[2]:
        kernels.append(
            Op(
                "convolution_backward",
                "reduction",
                arithmetic(gradient),
                0,
                touched(gradient),
                gradient.shape[1] * gradient.element_size(),
            )
        )
    return kernels


def _one_convolution(name, source, weight, out, groups, transposed, swap=False) -> Op:
    """Forward, or with `swap` the gradient of its input, as the matrix product of the pixels with
    the taps."""
    taps = prod(weight.shape[2:])
    small, large = (
        (source, out) if transposed else (out, source)
    )  # which side's pixels each tap multiplies
    pixels = small.shape[0] * prod(small.shape[2:])
    n, k = out.shape[1] // groups, source.shape[1] // groups * taps
    if swap:
        pixels, n, k = (
            large.shape[0] * prod(large.shape[2:]),
            source.shape[1] // groups,
            out.shape[1] // groups * taps,
        )
    flops = (
        2
        * small.shape[0]
        * prod(small.shape[2:])
        * (large.shape[1] // groups)
        * small.shape[1]
        * taps
    )
    depthwise = groups > 1 and groups == source.shape[1]
    last = (
        source.dim() == 4
        and source.is_contiguous(memory_format=torch.channels_last)
        and source.shape[1] > 1
    )
    read = touched(weight) + touched(out if swap else source)
    return Op(
        name,
        "depthwise" if depthwise else "convolution",
        arithmetic(source),
        flops,
        read,
        touched(source if swap else out),
        (groups, pixels, n, k),
        "nhwc" if last else "nchw",
    )

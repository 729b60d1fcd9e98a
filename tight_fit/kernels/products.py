"""The kernels that multiply matrices: products, fused attention, convolutions."""

from __future__ import annotations

from math import prod

from tight_fit.kernels.op import Op
from tight_fit.kernels.sizes import arithmetic, channels_last, tensors, touched


def product(name, args, kwargs, out) -> list[Op] | None:
    """A matrix product, also with a sum; None where an operand is a vector, which is no product."""
    left, right = (args[1], args[2]) if name.startswith(("add", "badd")) else (args[0], args[1])
    if left.dim() < 2 or right.dim() < 1:
        return None
    m, k = left.shape[-2:]
    n = right.shape[-1] if right.dim() > 1 else 1
    batch = prod(left.shape[:-2])
    layout = "n" if right.dim() < 2 or right.stride(-1) == 1 else "t"
    layout += "n" if left.stride(-1) == 1 else "t"
    read = touched(left) + touched(right) + (touched(args[0]) if left is not args[0] else 0)
    flops, shape = 2 * batch * m * n * k, (batch, m, n, k)
    return [Op(name, "matmul", arithmetic(left), flops, read, touched(out), shape, layout)]


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
    heads, width = prod(query.shape[:-2]), query.shape[-1]
    queries, keys = query.shape[-2], key.shape[-2]
    products = 5 if back else 2
    flops = 2 * products * heads * queries * keys * (width + value.shape[-1]) // 2
    flops = flops // 2 if causal else flops
    read = sum(map(touched, given)) + sum(map(touched, tensors(kwargs)))
    written = sum(map(touched, tensors(out)))
    shape, layout = (heads, queries, keys, width), "causal" if causal else ""
    return [Op(name, "attention", arithmetic(query), flops, read, written, shape, layout)]


def convolution(name, args, kwargs, out) -> list[Op]:
    """A convolution, or the kernels of its backward pass: one for each gradient that is asked."""
    if name == "convolution_backward":
        return _convolution_backward(args)
    transposed = args[6] if len(args) > 6 else False
    groups = args[8] if len(args) > 8 else 1
    return [_one_convolution(name, args[0], args[1], out, groups, transposed)]


def _convolution_backward(args) -> list[Op]:
    name = "convolution_backward"
    gradient, source, weight, _, _, _, _, transposed, _, groups, wanted = args[:11]
    sides = source, weight, gradient, groups, transposed
    kernels = []
    if wanted[0]:
        kernels.append(_one_convolution(name, *sides, swap=True))
    if wanted[1]:
        op = _one_convolution(name, *sides)
        batch, m, n, k = op.shape
        read, written = touched(source) + touched(gradient), touched(weight)
        shape, layout = (batch, n, k, m), f"{op.layout}/weights"
        kernels.append(op._replace(shape=shape, read=read, written=written, layout=layout))
    if wanted[2]:
        written = gradient.shape[1] * gradient.element_size()
        kernels.append(Op(name, "reduction", arithmetic(gradient), 0, touched(gradient), written))
    return kernels


def _one_convolution(name, source, weight, out, groups, transposed, swap=False) -> Op:
    """Forward, or with `swap` the gradient of its input, as the matrix product of the pixels with
    the taps."""
    taps = prod(weight.shape[2:])
    # Which side's pixels each tap multiplies.
    small, large = (source, out) if transposed else (out, source)
    pixels = small.shape[0] * prod(small.shape[2:])
    flops = 2 * pixels * (large.shape[1] // groups) * small.shape[1] * taps
    n, k = out.shape[1] // groups, source.shape[1] // groups
    if swap:
        pixels, n, k = large.shape[0] * prod(large.shape[2:]), k, n
    return Op(
        name,
        "depthwise" if groups > 1 and groups == source.shape[1] else "convolution",
        arithmetic(source),
        flops,
        touched(weight) + touched(out if swap else source),
        touched(source if swap else out),
        (groups, pixels, n, k * taps),
        "nhwc" if channels_last(source) else "nchw",
    )

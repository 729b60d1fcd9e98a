"""What a GPU runs for one operation of torch: kernels with their work and traffic, from shapes
alone."""

from __future__ import annotations

from math import prod

import torch

from tight_fit.kernels import names, products
from tight_fit.kernels.op import Op
from tight_fit.kernels.sizes import arithmetic, channels_last, tensors, touched
from tight_fit.torch_private import is_view, written_arguments

# A multi-tensor kernel takes so many tensors a launch by lists of tensors, and 320 blocks of
# 65,536 elements (PyTorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh).
TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)
BLOCKS_A_LAUNCH, BLOCK = 320, 65536
MESSAGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # collectives


def describe(function, args, kwargs, out) -> list[Op]:
    """The kernels of one dispatched operation; an empty list where no kernel runs. Sizes come from
    `args` and `out`."""
    name = function.overloadpacket.__name__
    if name in names.VIEWS or name in names.NOTHING or is_view(function):
        return []
    if function.namespace in MESSAGES:
        return [Op(name, "message", "fp32", 0, 0, _bytes(out))]
    if name in names.WAITS:
        return [Op(name, "wait", "fp32", 0, 0, 0)]
    for known, rule in RULES:
        if name in known:
            kernels = rule(name, args, kwargs, out)
            if kernels is not None:
                return kernels
    if name.startswith(("_foreach", "_fused_", "_amp_foreach")):
        return [_multi_tensor(function, name, args, kwargs, out)]
    return [_simple(function, name, args, kwargs, out)]


def _bytes(values) -> int:
    """Of all tensors in nested lists, tuples and dicts."""
    return sum(map(touched, tensors(values)))


def _traffic(function, args, kwargs, out) -> tuple[int, int]:
    """(bytes read, bytes written) of an operation that reads every operand and writes every result
    once."""
    name = function.overloadpacket.__name__
    changed = [
        args[position] if position < len(args) else kwargs.get(word)
        for position, word in written_arguments(function)
    ]
    changed = tensors(changed)
    written = _bytes(changed or out)
    read = _bytes((args, kwargs))
    if name in names.FILLS or name == "copy_":
        read -= touched(args[0]) if tensors(args[:1]) else 0
    return max(0, read), written


def _simple(function, name, args, kwargs, out) -> Op:
    """One kernel limited by memory: element by element, a reduction, a softmax, a copy."""
    read, written = _traffic(function, args, kwargs, out)
    first = next(iter(tensors(args)), None)
    kind = "elementwise"
    shape: tuple[int, ...] = ()
    if name in names.SOFTMAXES:
        kind = "softmax"
        axis = args[2] if "backward" in name else args[1] if isinstance(args[1], int) else -1
        width = args[0].shape[axis] if args[0].dim() else 1
        shape = (args[0].numel() // max(1, width), width)
    elif name in names.REDUCTIONS:
        kind = "reduction"
    elif name in names.COPIES and first is not None and _changes_layout(args, out):
        kind = "transpose"
    layout = _walk(name, args, kwargs, out) if kind == "elementwise" else ""
    number = arithmetic(first) if first is not None else "fp32"
    return Op(name, kind, number, 0, read, written, shape, layout)


def _walk(name, args, kwargs, out) -> str:
    """How an elementwise kernel walks through memory, as `Op.layout` names it.

    PyTorch reads several neighbours at once where all operands lie in memory as the result does. It
    computes an address for every element where one does not, and reads element by element where
    dtypes differ, but for copies from fp32 to 16 bits (aten/src/ATen/native/cuda, CUDALoops.cuh and
    Copy.cu).
    """
    results = tensors(out)
    if not results:
        return ""
    if name in ("cat", "stack"):
        return "strided"
    result = max(results, key=torch.Tensor.numel)
    order = [(stride, size) for size, stride in zip(result.shape, result.stride()) if size > 1]
    expected = 1
    for stride, size in sorted(order):
        if stride != expected:
            return "strided"
        expected *= size
    casts = False
    for tensor in () if name in names.FILLS else tensors((args, kwargs)):
        if tensor.dim() == 0 and tensor.device != result.device:
            continue  # a number, which the kernel gets with its launch
        own = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]
        if tensor.shape != result.shape or own != order:
            return "strided"
        narrows = name in names.COPIES and tensor.dtype == torch.float32 and result.itemsize == 2
        casts |= tensor.dtype != result.dtype and not narrows
    return "cast" if casts else ""


def _changes_layout(args, out) -> bool:
    source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
    target = args[0] if source is not args[0] else out
    if not isinstance(target, torch.Tensor) or source.dim() < 2 or source.shape != target.shape:
        return False
    before, after = _fastest_axis(source), _fastest_axis(target)
    return before != after and None not in (before, after)


def _fastest_axis(tensor: torch.Tensor) -> int | None:
    """The axis along which neighbours lie side by side; None where none does."""
    axes = (axis for axis in reversed(range(tensor.dim())) if tensor.shape[axis] > 1)
    return next((axis for axis in axes if tensor.stride(axis) == 1), None)


def _multi_tensor(function, name, args, kwargs, out) -> Op:
    """foreach and fused optimizers: one pass over lists of tensors, in launches of limited size."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and tensors(value)]
    read, written = _traffic(function, args, kwargs, out)
    count = len(lists[0]) if lists else 1
    more = 0 if written_arguments(function) or not tensors(out) else 1
    depth = max(1, min(len(lists) + more, len(TENSORS_A_LAUNCH)))
    blocks = sum(-(-tensor.numel() // BLOCK) for tensor in tensors(lists[:1]))
    launches = max(1, -(-count // TENSORS_A_LAUNCH[depth - 1]), -(-blocks // BLOCKS_A_LAUNCH))
    elements = (sum(tensor.numel() for tensor in tensors(lists[:1])),)
    return Op(name, "multi_tensor", "fp32", 0, read, written, elements, "", launches)


def _layer_norm(name, args, kwargs, out) -> list[Op]:
    if name == "native_layer_norm":
        width, read, written = prod(args[1]), _bytes(args), _bytes(out)
        rows = (args[0].numel() // width, width)
        return [Op(name, "norm", arithmetic(args[0]), 0, read, written, rows)]
    gradient, source, shape = args[:3]
    width, size = prod(shape), touched(gradient) + touched(source)
    rows = (source.numel() // width, width)
    kernels = [Op(name, "norm", arithmetic(source), 0, size, touched(source), rows)]
    # The sums over rows, of the weight's and bias's gradients, are a kernel of their own.
    if any(args[-1][1:]):
        written = 2 * width * 4
        kernels.append(Op(name, "reduction", arithmetic(source), 0, size, written, rows, "columns"))
    return kernels


def _group_norm(name, args, kwargs, out) -> list[Op]:
    first, passes = args[0], 2 if args[0].numel() else 1
    rows = (first.shape[0], first.numel() // max(1, first.shape[0]))
    return [Op(name, "norm", arithmetic(first), 0, _bytes(args) * passes, _bytes(out), rows)]


def _batch_norm(name, args, kwargs, out) -> list[Op]:
    """Statistics first, then the result: each input is read twice; in the backward pass gradient
    and input both are."""
    back = "backward" in name
    source = args[1] if back else args[0]
    training = back or next((value for value in args if isinstance(value, bool)), True)
    read = touched(source) * (2 if back else 1) * (2 if training else 1)
    channels = source.shape[1] if source.dim() > 1 else 1
    shape = (channels, source.numel() // max(1, channels))
    layout = "nhwc" if channels_last(source) else "nchw"
    return [Op(name, "batch_norm", arithmetic(source), 0, read, touched(source), shape, layout)]


def _gather(name, args, kwargs, out) -> list[Op]:
    rows = tensors(out)[0]
    read = touched(rows) + _bytes(args[1:])
    return [Op(name, "gather", arithmetic(rows), 0, read, touched(rows))]


def _scatter(name, args, kwargs, out) -> list[Op]:
    """The whole result is written first (zeros, or a copy), then the rows that are meant are read
    and added."""
    result = tensors(out)[0] if tensors(out) else args[0]
    given = tensors(args if name == "embedding_dense_backward" else args[1:])
    moved = _bytes(given)
    whole = 0 if name.endswith("_") else touched(result)
    return [Op(name, "scatter", arithmetic(result), 0, moved * 2, whole + moved, (), "", 4)]


def _fsdp_copy(name, args, kwargs, out) -> list[Op]:
    """FSDP2's copies between parameters and the buffers of its messages: what is there is read
    once, and as much is written, in the dtype of the buffer."""
    given = tensors(args[0])
    buffer = args[1] if name == "all_gather_copy_in" else kwargs.get("out", args[0])
    read = _bytes(given)
    width = tensors(buffer)[0].element_size() / given[0].element_size()
    return [Op(name, "elementwise", arithmetic(given[0]), 0, read, int(read * width))]


def _eight_bit(name, args, kwargs, out) -> list[Op]:
    """bitsandbytes' step: reads gradient, weight, states and their scales, writes all but the
    gradient."""
    gradient = next(value for value in tensors((args, kwargs)))
    every = _bytes((args, kwargs))
    elements = (gradient.numel(),)
    return [Op(name, "multi_tensor", "fp32", 0, every, every - touched(gradient), elements)]


RULES = (
    (names.PRODUCTS, products.product),
    (names.GROUPED_PRODUCTS, products.grouped_product),
    (names.ATTENTION, products.attention),
    (names.CONVOLUTIONS, products.convolution),
    (names.LAYER_NORMS, _layer_norm),
    (names.GROUP_NORMS, _group_norm),
    (names.BATCH_NORMS, _batch_norm),
    (names.GATHERS, _gather),
    (names.SCATTERS, _scatter),
    (names.FSDP_COPIES, _fsdp_copy),
    (names.EIGHT_BIT, _eight_bit),
)

"""What a GPU runs for one operation of torch: kernels with their work and traffic, from shapes alone."""
from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
from torch.utils._pytree import tree_leaves

from helpers.timing.op import Op

ARITHMETIC = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
VIEWS = {"_unsafe_view", "detach", "detach_", "alias", "lift_fresh", "_reshape_alias", "set_", "resize_", "split",
         "split_with_sizes", "unbind", "chunk", "unsafe_split", "unsafe_chunk", "is_same_size", "as_strided_"}
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "_nested_tensor_size",
           "_record_function_enter_new", "_record_function_exit",
           "sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "record_stream"}
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select"}
FILLS = {"zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full",
         "arange", "scalar_tensor", "random_", "normal_", "uniform_", "bernoulli_", "randint", "rand", "randn", "eye"}
GATHERS = {"embedding", "index", "gather", "index_select", "take", "take_along_dim"}
SCATTERS = {"index_put", "index_put_", "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter", "scatter_",
            "embedding_dense_backward", "_index_put_impl_", "gather_backward", "slice_scatter", "select_scatter"}
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "var_mean", "std", "std_mean", "norm",
              "linalg_vector_norm", "prod", "any", "all", "logsumexp", "cumsum", "nll_loss_forward", "topk", "sort"}
SOFTMAXES = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "_safe_softmax"}
COPIES = {"clone", "contiguous", "copy_", "_to_copy"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_scaled_mm", "addbmm", "dot"}
# A multi-tensor kernel takes so many tensors a launch by lists of tensors, and 320 blocks of 65,536 elements
# (PyTorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh).
TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)
BLOCKS_A_LAUNCH, BLOCK = 320, 65536
# bitsandbytes launches one kernel a tensor (Dettmers et al. 2021).


def describe(function, args, kwargs, out) -> list[Op]:
    """The kernels of one dispatched operation; an empty list where no kernel runs. Sizes come from `args` and `out`."""
    name = function.overloadpacket.__name__
    if name in VIEWS or name in NOTHING or _is_view(function):
        return []
    if name in WAITS:
        return [Op(name, "wait", "fp32", 0, 0, 0)]
    for names, rule in RULES:
        if name in names:
            found = rule(name, args, kwargs, out)
            if found is not None:
                return found
    if name.startswith(("_foreach", "_fused_", "_amp_foreach")):
        return [_multi_tensor(function, name, args, kwargs, out)]
    return [_simple(function, name, args, kwargs, out)]


@lru_cache(maxsize=None)
def _is_view(function) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(part.alias_info is not None and not part.alias_info.is_write for part in returns)


@lru_cache(maxsize=None)
def _written_arguments(function) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operation changes in place."""
    return tuple((place, argument.name) for place, argument in enumerate(function._schema.arguments)
                 if argument.alias_info is not None and argument.alias_info.is_write)


def tensors(values) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's own elements; a dimension that was expanded (stride 0) is read once."""
    return prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride) * tensor.element_size()


def arithmetic(tensor: torch.Tensor) -> str:
    return ARITHMETIC.get(tensor.dtype, "fp32")


def _traffic(function, args, kwargs, out) -> tuple[int, int]:
    """(bytes read, bytes written) of an operation that reads every operand and writes every result once."""
    name = function.overloadpacket.__name__
    changed = [args[place] if place < len(args) else kwargs.get(word) for place, word in _written_arguments(function)]
    changed = tensors(changed)
    written = sum(map(touched, changed)) if changed else sum(map(touched, tensors(out)))
    read = sum(map(touched, tensors((args, kwargs))))
    if name in FILLS or name == "copy_":
        read -= touched(args[0]) if tensors(args[:1]) else 0
    return max(0, read), written


def _simple(function, name, args, kwargs, out) -> Op:
    """One kernel limited by memory: element by element, a reduction, a softmax, a copy."""
    read, written = _traffic(function, args, kwargs, out)
    first = next(iter(tensors(args)), None)
    kind, shape = "elementwise", ()
    if name in SOFTMAXES:
        kind, width = "softmax", args[0].shape[args[1] if isinstance(args[1], int) else -1] if args[0].dim() else 1
        if "backward" in name:
            width = args[0].shape[args[2]] if args[0].dim() else 1
        shape = (args[0].numel() // max(1, width), width)
    elif name in REDUCTIONS:
        kind = "reduction"
    elif name in COPIES and first is not None and _changes_layout(args, out):
        kind = "transpose"
    elif name == "cat" or name == "stack":
        kind = "elementwise"
    return Op(name, kind, arithmetic(first) if first is not None else "fp32", 0, read, written, shape)


def _changes_layout(args, out) -> bool:
    source = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
    target = args[0] if source is not args[0] else out
    if not isinstance(target, torch.Tensor) or source.dim() < 2 or source.shape != target.shape:
        return False
    order = [sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1)
             for tensor in (source, target)]
    fastest = [next((place for place in reversed(range(tensor.dim())) if tensor.stride(place) == 1 and tensor.shape[place] > 1),
                    None) for tensor in (source, target)]
    return fastest[0] != fastest[1] and None not in fastest and bool(order[0])


def _multi_tensor(function, name, args, kwargs, out) -> Op:
    """foreach and fused optimizers: one pass over lists of tensors, in launches of limited size."""
    lists = [value for value in args if isinstance(value, (list, tuple)) and tensors(value)]
    read, written = _traffic(function, args, kwargs, out)
    count = len(lists[0]) if lists else 1
    depth = min(len(lists) + (0 if _written_arguments(function) or not tensors(out) else 1), len(TENSORS_A_LAUNCH))
    blocks = sum(-(-tensor.numel() // BLOCK) for tensor in tensors(lists[:1]))
    launches = max(1, -(-count // TENSORS_A_LAUNCH[max(depth, 1) - 1]), -(-blocks // BLOCKS_A_LAUNCH))
    return Op(name, "multi_tensor", "fp32", 0, read, written, (), "", launches)


def _product(name, args, kwargs, out) -> list[Op] | None:
    left, right = (args[1], args[2]) if name.startswith(("add", "badd")) else (args[0], args[1])
    if left.dim() < 2 or right.dim() < 1:
        return None
    m, k = left.shape[-2:]
    n = right.shape[-1] if right.dim() > 1 else 1
    batch = prod(left.shape[:-2])
    layout = ("n" if right.dim() < 2 or right.stride(-1) == 1 else "t") + ("n" if left.stride(-1) == 1 else "t")
    read = touched(left) + touched(right) + (touched(args[0]) if left is not args[0] else 0)
    return [Op(name, "matmul", arithmetic(left), 2 * batch * m * n * k, read, touched(out), (batch, m, n, k), layout)]


def _attention(name, args, kwargs, out) -> list[Op] | None:
    """PyTorch's fused attention (flash, Dao et al. 2022; memory-efficient, Rabe and Staats 2021): products stay on the chip."""
    back = name.endswith("backward")
    given = tensors(args)
    query, key, value = given[1:4] if back else given[:3]
    causal = any(value is True for value in args[3:]) or kwargs.get("is_causal", False)
    heads, queries, keys, width = prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]
    products = 5 if back else 2
    flops = 2 * products * heads * queries * keys * (width + value.shape[-1]) // 2
    read = sum(map(touched, given)) + sum(map(touched, tensors(kwargs)))
    results = tensors(out)
    return [Op(name, "attention", arithmetic(query), flops // 2 if causal else flops, read, sum(map(touched, results)),
               (heads, queries, keys, width), "causal" if causal else "")]


def _convolution(name, args, kwargs, out) -> list[Op]:
    if name == "convolution_backward":
        return _convolution_backward(args)
    return [_one_convolution(name, args[0], args[1], out, args[8] if len(args) > 8 else 1, args[6] if len(args) > 6 else False)]


def _convolution_backward(args) -> list[Op]:
    gradient, source, weight, _, _, _, _, transposed, _, groups, wanted = args[:11]
    found = []
    if wanted[0]:
        found.append(_one_convolution("convolution_backward", source, weight, gradient, groups, transposed, swap=True))
    if wanted[1]:
        op = _one_convolution("convolution_backward", source, weight, gradient, groups, transposed)
        batch, m, n, k = op.shape
        found.append(op._replace(shape=(batch, n, k, m), read=touched(source) + touched(gradient), written=touched(weight),
                                 layout=op.layout + "/weights"))
    if wanted[2]:
        found.append(Op("convolution_backward", "reduction", arithmetic(gradient), 0, touched(gradient),
                        gradient.shape[1] * gradient.element_size()))
    return found


def _one_convolution(name, source, weight, out, groups, transposed, swap=False) -> Op:
    """Forward, or with `swap` the gradient of its input, as the matrix product of the pixels with the taps."""
    taps = prod(weight.shape[2:])
    small, large = (source, out) if transposed else (out, source)  # which side's pixels each tap multiplies
    pixels = small.shape[0] * prod(small.shape[2:])
    n, k = out.shape[1] // groups, source.shape[1] // groups * taps
    if swap:
        pixels, n, k = large.shape[0] * prod(large.shape[2:]), source.shape[1] // groups, out.shape[1] // groups * taps
    flops = 2 * small.shape[0] * prod(small.shape[2:]) * (large.shape[1] // groups) * small.shape[1] * taps
    depthwise = groups > 1 and groups == source.shape[1]
    last = source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last) and source.shape[1] > 1
    read = touched(weight) + touched(out if swap else source)
    return Op(name, "depthwise" if depthwise else "convolution", arithmetic(source), flops, read,
              touched(source if swap else out), (groups, pixels, n, k), "nhwc" if last else "nchw")


def _layer_norm(name, args, kwargs, out) -> list[Op]:
    if name == "native_layer_norm":
        width = prod(args[1])
        return [Op(name, "norm", arithmetic(args[0]), 0, sum(map(touched, tensors(args))), sum(map(touched, tensors(out))),
                   (args[0].numel() // width, width))]
    gradient, source, shape = args[:3]
    width, size = prod(shape), touched(gradient) + touched(source)
    rows = (source.numel() // width, width)
    found = [Op(name, "norm", arithmetic(source), 0, size, touched(source), rows)]
    if any(args[-1][1:]):  # the sums over rows, of the weight's and bias's gradients, are a kernel of their own
        found.append(Op(name, "reduction", arithmetic(source), 0, size, 2 * width * 4, rows, "columns"))
    return found


def _group_norm(name, args, kwargs, out) -> list[Op]:
    read, written = sum(map(touched, tensors(args))), sum(map(touched, tensors(out)))
    passes = 2 if args[0].numel() else 1
    return [Op(name, "norm", arithmetic(args[0]), 0, read * passes, written, (args[0].shape[0], args[0].numel()
                                                                          // max(1, args[0].shape[0])))]


def _batch_norm(name, args, kwargs, out) -> list[Op]:
    """Statistics first, then the result: each input is read twice; in the backward pass gradient and input both are."""
    back = "backward" in name
    source = args[1] if back else args[0]
    large = touched(source) * (2 if back else 1)
    last = source.dim() == 4 and source.shape[1] > 1 and source.is_contiguous(memory_format=torch.channels_last)
    training = True if back else bool(next((value for value in args if isinstance(value, bool)), True))
    return [Op(name, "batch_norm", arithmetic(source), 0, large * (2 if training else 1), touched(source),
               (source.shape[1] if source.dim() > 1 else 1, source.numel() // max(1, source.shape[1] if source.dim() > 1 else 1)),
               "nhwc" if last else "nchw")]


def _gather(name, args, kwargs, out) -> list[Op]:
    rows = tensors(out)[0]
    places = tensors(args[1:])
    return [Op(name, "gather", arithmetic(rows), 0, touched(rows) + sum(map(touched, places)), touched(rows))]


def _scatter(name, args, kwargs, out) -> list[Op]:
    """The whole result is written first (zeros, or a copy), then the rows that are meant are read and added."""
    result = tensors(out)[0] if tensors(out) else args[0]
    given = tensors(args if name == "embedding_dense_backward" else args[1:])
    moved = sum(map(touched, given))
    whole = 0 if name.endswith("_") else touched(result)
    return [Op(name, "scatter", arithmetic(result), 0, moved * 2, whole + moved, (), "", 4)]


def _eight_bit(name, args, kwargs, out) -> list[Op]:
    """bitsandbytes' step: reads gradient, weight, states and their scales, writes all but the gradient."""
    gradient = next(value for value in tensors((args, kwargs)))
    every = sum(map(touched, tensors((args, kwargs))))
    return [Op(name, "multi_tensor", "fp32", 0, every, every - touched(gradient))]


ATTENTION = {f"_scaled_dot_product_{kind}attention{where}{back}" for kind in ("flash_", "efficient_", "cudnn_",
             "fused_") for where in ("", "_for_cpu", "_overrideable") for back in ("", "_backward")}
RULES = ((PRODUCTS, _product), (ATTENTION, _attention),
         ({"convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "convolution_backward"}, _convolution),
         ({"native_layer_norm", "native_layer_norm_backward"}, _layer_norm),
         ({"native_group_norm", "native_group_norm_backward"}, _group_norm),
         ({"native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
           "_native_batch_norm_legit"}, _batch_norm),
         (GATHERS, _gather), (SCATTERS, _scatter),
         ({"optimizer_update_8bit_blockwise", "optimizer_update_32bit"}, _eight_bit))

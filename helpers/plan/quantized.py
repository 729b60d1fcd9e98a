"""Layers of bitsandbytes whose weights have 4 or 8 bits, on tensors without values.

`Linear4bit` (Dettmers et al. 2023, QLoRA) keeps two weights in a byte, a scale for every 64 of them
(fp32, or with double quantization one byte, with a scale of its own for every 256), and tables of
16 and 256 values. `Linear8bitLt` (Dettmers et al. 2022, LLM.int8()) keeps a byte for each weight
and a scale for each output. Both compute products of training sizes in 16 bits, the first with the
weight written out in the dtype that it had before.

The library's own tensor classes cannot be made of tensors without values. Here their place is taken
by plain parameters of the same sizes, and the layers' products by the same allocations as those of
its CUDA kernels (bitsandbytes 0.50, autograd/_functions.py and backends/cuda/ops.py). Outlier
columns of LLM.int8() depend on values and are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from helpers.plan.gpu_calls import Places

SCALED, SCALED_TWICE = 64, 256  # weights, and scales, that share a scale
CODES, CODES_TWICE = 16, 256  # values in the tables of 4 and 8 bits


def state_tensors(module: nn.Module) -> list[torch.Tensor]:
    """What quantized weights of a module hold beside their bytes: scales, tables, offsets."""
    tensors = []
    for layer in module.modules():
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is not None:
            second = state.state2
            tensors += [state.absmax, state.code]
            tensors += [state.offset, second.absmax, second.code] if second is not None else []
        scales = getattr(getattr(layer, "state", None), "SCB", None)
        tensors += [scales] if isinstance(scales, torch.Tensor) else []
    return tensors


def quantize(module: nn.Module) -> None:
    """Quantize, in place, the weights of layers of bitsandbytes that are not quantized yet."""
    for layer in module.modules():
        fields = getattr(getattr(layer, "weight", None), "of_bitsandbytes", None)
        if fields is not None and not fields["quantized"]:
            fields["quantized"] = True
            (_to_4_bits if fields["bits"] == 4 else _to_8_bits)(layer, fields)


@contextmanager
def quantized_layers(places: Places) -> Iterator[None]:
    """Inside, the layers can be made, moved (which quantizes them, as on a GPU) and run.

    bitsandbytes has to be imported before. Raises NotImplementedError, one sentence, where it is
    not, and for `Linear8bitLt` that trains its weight (has_fp16_weights=True).
    """
    try:
        with _stand_ins(places):
            yield
    except RuntimeError as error:
        if "Creating a new Tensor subclass" not in str(error):
            raise
        raise NotImplementedError(
            "A tensor class of a library cannot be made without values: for layers of bitsandbytes "
            "import bitsandbytes before planning, for others plan nn.Linear in bf16 instead."
        ) from error


@contextmanager
def _stand_ins(places: Places) -> Iterator[None]:
    library: Any = sys.modules.get("bitsandbytes")
    if library is None:
        yield
        return
    layers: Any = import_module("bitsandbytes.nn.modules")

    def apply(layer: nn.Module, function, recurse: bool = True) -> nn.Module:
        nn.Module._apply(layer, function, recurse)
        if places.named and places.on_gpu(layer.weight):  # type: ignore[arg-type]
            quantize(layer)
        return layer

    with ExitStack() as patches:
        for owner, name, value in (
            (layers.Params4bit, "__new__", staticmethod(_weight_of_4_bits)),
            (layers.Int8Params, "__new__", staticmethod(_weight_of_8_bits)),
            (layers, "has_avx512bf16", lambda: False),
            (layers.Linear4bit, "_apply", apply),
            (layers.Linear8bitLt, "_apply", apply),
            (library, "matmul_4bit", _matmul_4bit),
            (library, "matmul", _matmul_8bit),
        ):
            patches.enter_context(patch.object(owner, name, value, create=name == "_apply"))
        yield


def _weight_of_4_bits(
    kind,
    data=None,
    requires_grad=False,
    quant_state=None,
    blocksize=None,
    compress_statistics=True,
    quant_type="fp4",
    quant_storage=torch.uint8,
    module=None,
    bnb_quantized=False,
    **others,
):
    weight: Any = nn.Parameter(data, requires_grad=False)
    weight.quant_state = quant_state
    weight.of_bitsandbytes = {
        "bits": 4,
        "quantized": bnb_quantized,
        "block": blocksize or SCALED,
        "double": compress_statistics,
        "storage": quant_storage,
    }
    return weight


def _weight_of_8_bits(
    kind, data=None, requires_grad=True, has_fp16_weights=False, CB=None, SCB=None, **others
):
    if has_fp16_weights:
        raise NotImplementedError(
            "Linear8bitLt that trains its weight is not planned: give it has_fp16_weights=False, "
            "or use nn.Linear."
        )
    weight: Any = nn.Parameter(data, requires_grad=False)
    weight.CB, weight.SCB = CB, SCB
    weight.of_bitsandbytes = {"bits": 8, "quantized": CB is not None}
    return weight


def _to_4_bits(layer: Any, fields: dict[str, Any]) -> None:
    full = layer.weight.data
    scales = -(-full.numel() // fields["block"])

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return full.new_empty(shape, dtype=dtype)

    packed = empty(
        (full.numel() + 1) // (2 * fields["storage"].itemsize), 1, dtype=fields["storage"]
    )
    state = SimpleNamespace(
        shape=full.shape, dtype=full.dtype, code=empty(CODES), offset=None, state2=None
    )
    if fields["double"]:
        state.absmax, state.offset = empty(scales, dtype=torch.uint8), empty()
        second = -(-scales // SCALED_TWICE)
        state.state2 = SimpleNamespace(absmax=empty(second), code=empty(CODES_TWICE))
    else:
        state.absmax = empty(scales)
    layer.weight.data = packed
    layer.weight.quant_state = layer.quant_state = state


def _to_8_bits(layer: Any, fields: dict[str, Any]) -> None:
    full = layer.weight.data
    layer.state.CB = layer.weight.data = full.new_empty(full.shape, dtype=torch.int8)
    layer.state.SCB = full.new_empty(full.shape[0], dtype=torch.float32)


def _written_out(state: SimpleNamespace, dtype: torch.dtype) -> torch.Tensor:
    """A 4-bit weight in the dtype that it was quantized from, then in that of the input."""
    scales = state.absmax
    if state.state2 is not None:
        scales = scales.new_empty(scales.shape, dtype=torch.float32)
    return scales.new_empty(state.shape, dtype=state.dtype).to(dtype)


class _Product4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, state):
        ctx.state, ctx.bias = state, None if bias is None else bias.dtype
        return F.linear(x, _written_out(state, x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient):
        bias = gradient.flatten(0, -2).sum(0, dtype=ctx.bias) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, bias, None
        return torch.matmul(gradient, _written_out(ctx.state, gradient.dtype)), bias, None


def _matmul_4bit(A, B, quant_state, out=None, bias=None):
    return _Product4bit.apply(A, bias, quant_state)


class _Product8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, state):
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        if state.threshold > 0:
            _ = half.abs() >= state.threshold
        quantized = torch.empty_like(half, dtype=torch.int8)
        scales = half.new_empty(len(half), dtype=torch.float32)
        del half
        whole = quantized.new_empty(len(rows), state.CB.shape[0], dtype=torch.int32)
        out = torch.empty_like(whole, dtype=torch.float16)
        del whole, quantized, scales
        ctx.kept, ctx.state, ctx.shape = rows, state, x.shape
        ctx.bias = None if bias is None else bias.dtype
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        bias = gradient.flatten(0, -2).sum(0, dtype=ctx.bias) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, bias, None
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        dtype = ctx.kept.dtype
        weight = ctx.state.CB.to(dtype).mul_(ctx.state.SCB.unsqueeze(1).mul(1 / 127))
        return torch.matmul(rows.to(dtype), weight).view(ctx.shape), bias, None


def _matmul_8bit(A, B, out=None, state=None, threshold=0.0, bias=None):
    return _Product8bit.apply(A, bias, state)

"""Layers of bitsandbytes whose weights have 4 or 8 bits, on tensors without values.

`Linear4bit` (Dettmers et al. 2023, QLoRA) keeps two weights in a byte, a scale for every 64 of them
(fp32, or with double quantization one byte, with a scale of its own for every 256), and tables of
16 and 256 values. `Linear8bitLt` (Dettmers et al. 2022, LLM.int8()) keeps a byte for each weight
and a scale for each output. Both compute products of training sizes in 16 bits, the first with the
weight written out in the dtype that it had before.

The library's own tensor classes cannot be made of tensors without values. Here their place is taken
by parameters of the same sizes that are instances of both (`_Weight`), and the place of the layers'
products by the same allocations as those of its CUDA kernels (bitsandbytes 0.50,
autograd/_functions.py and backends/cuda/ops.py). Outlier columns of LLM.int8() depend on values and
are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from tight_fit.techniques.four_bits import BLOCK_OF_SCALES, CODES, CODES_OF_SCALES
from tight_fit.techniques.four_bits import state_tensors as tensors_of
from tight_fit.torch_private import MAKE_SUBCLASS, FakeTensor, parse_to
from tight_fit.trace.gpu_calls import Places


def state_tensors(module: nn.Module) -> list[torch.Tensor]:
    """What quantized weights of a module hold beside their bytes: scales, tables, offsets."""
    return [tensor for layer in module.modules() for tensor in state_of(layer)]


def state_of(layer: nn.Module) -> list[torch.Tensor]:
    """The same of one layer."""
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    tensors = [] if state is None else tensors_of(state)
    for holder in (getattr(layer, "weight", None), getattr(layer, "state", None)):
        scales = getattr(holder, "SCB", None)
        tensors += [scales] if isinstance(scales, torch.Tensor) else []
    return tensors


def in_4_bits(weight: torch.Tensor) -> bool:
    """Whether it is a real weight of bitsandbytes that has its 4 bits."""
    return type(weight).__name__ == "Params4bit" and bool(getattr(weight, "bnb_quantized", False))


def copy_4_bits(
    weight: Any, memo: dict[int, Any], twin: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A copy of a real weight `in_4_bits`, made of what `twin` makes of its tensors.

    memo  as of `deepcopy`, is told of the copy and of that of its state, which its layer holds too
    """
    for tensor in tensors_of(weight.quant_state):
        memo[id(tensor)] = twin(tensor)
    made: Any = type(weight)(twin(weight.data), requires_grad=False)
    for name, value in vars(weight).items():
        setattr(made, name, value)
    made.quant_state = deepcopy(weight.quant_state, memo)
    memo[id(weight)] = made
    return made


def quantize(module: nn.Module) -> None:
    """Quantize, in place, the weights of layers of bitsandbytes that are not quantized yet."""
    for weight in module.parameters():
        if isinstance(weight, _Weight) and not weight.quantized:
            weight.quantize()


@contextmanager
def quantized_layers(places: Places) -> Iterator[None]:
    """Inside, the layers can be made, moved (to the GPU they are quantized) and run.

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

    weights = ((layers.Params4bit, _In4Bits), (layers.Int8Params, _In8Bits))
    with ExitStack() as patches:
        for owner, name, value in (
            *((kind, "__new__", _maker(kind, ours, places)) for kind, ours in weights),
            (layers, "has_avx512bf16", lambda: False),
            (library, "matmul_4bit", _matmul_4bit),
            (library, "matmul", _matmul_8bit),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield


def _maker(kind: type, ours: type[_Weight], places: Places) -> Any:
    """`kind.__new__` for tensors without values: the library's own, which sets all attributes."""
    make: Any = kind.__new__
    subclass = getattr(*MAKE_SUBCLASS)
    stand_in: Any = type(kind.__name__, (ours, kind), {"places": places})

    def made_of(wanted, data, *args, **kwargs):
        if wanted is not kind:  # as FakeTensor's
            return subclass(wanted, data, *args, **kwargs)
        made: Any = nn.Parameter(data, *args, **kwargs)
        made.__class__ = stand_in
        made.before = {*vars(made), "before"}
        return made

    def new(_, data=None, *args, **kwargs):
        if data is not None:
            data = nn.Parameter(data, requires_grad=False).data  # without values
        with patch.object(*MAKE_SUBCLASS, staticmethod(made_of)):
            return make(kind, data, *args, **kwargs)

    stand_in.__new__ = new
    return staticmethod(new)


class _Weight(FakeTensor):
    """A weight of bitsandbytes without values. Beside this class, it is of one of the library's.

    So it has the type, the name and the properties of the library's weights, and the attributes
    that the library gives them, for all that asks: peft, transformers, accelerate. What the library
    does with values when a weight is moved or copied is replaced.

    places  knows what is on the GPU
    before  names of the attributes that are not the library's
    """

    places: Places
    before: set[str]

    @property
    def quantized(self) -> bool:
        """Whether it has its bits."""
        raise NotImplementedError

    def quantize(self) -> None:
        """Give it its bits, in place."""
        raise NotImplementedError

    def to(self, *args, **kwargs):
        """What `Tensor.to` gives; a weight that is told to be on the GPU is quantized, in place."""
        data, device = self.data.to(*args, **kwargs), parse_to(*args, **kwargs)[0]
        if self.quantized or device is None or not self.places.on_gpu(data):
            return self._with(data)
        self.data = data
        self.quantize()
        return self

    def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
        return self.to("cuda" if device is None else device)

    def cpu(self, memory_format=torch.preserve_format):
        return self.to("cpu")

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = made = self._with(self.data.clone())
            for name in {"quant_state", "CB", "SCB"} & vars(made).keys():
                setattr(made, name, deepcopy(getattr(made, name), memo))
        return memo[id(self)]

    def _with(self, data: torch.Tensor) -> Any:
        """This weight with other data."""
        made: Any = type(self)(data, requires_grad=self.requires_grad)
        for name, value in vars(self).items():
            if name not in self.before:
                setattr(made, name, value)
        return made


class _In4Bits(_Weight):
    bnb_quantized: bool

    @property
    def quantized(self) -> bool:
        return self.bnb_quantized

    def quantize(self) -> None:
        weight: Any = self
        full, storage = weight.data, weight.quant_storage
        scales = -(-full.numel() // weight.blocksize)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return full.new_empty(shape, dtype=dtype)

        weight.data = empty((full.numel() + 1) // (2 * storage.itemsize), 1, dtype=storage)
        shared = {"blocksize": weight.blocksize, "quant_type": weight.quant_type}
        shared |= {"shape": full.shape, "dtype": full.dtype, "code": empty(CODES)}
        make_state = import_module("bitsandbytes.functional").QuantState
        if weight.compress_statistics:
            second = -(-scales // BLOCK_OF_SCALES)
            codes = {
                "code": empty(CODES_OF_SCALES),
                "blocksize": BLOCK_OF_SCALES,
                "dtype": torch.float32,
            }
            nested = make_state(empty(second), **codes)
            small = empty(scales, dtype=torch.uint8)
            weight.quant_state = make_state(small, **shared, offset=empty(), state2=nested)
        else:
            weight.quant_state = make_state(empty(scales), **shared)
        weight.bnb_quantized = True
        if weight.module is not None:
            weight.module.quant_state = weight.quant_state


class _In8Bits(_Weight):
    @property
    def quantized(self) -> bool:
        return self.dtype == torch.int8

    def quantize(self) -> None:
        weight: Any = self
        if weight.has_fp16_weights:
            raise NotImplementedError(
                "Linear8bitLt that trains its weight is not planned: give it "
                "has_fp16_weights=False, or use nn.Linear."
            )
        full = weight.data
        weight.CB = weight.data = full.new_empty(full.shape, dtype=torch.int8)
        weight.SCB = full.new_empty(full.shape[0], dtype=torch.float32)


def _written_out(state: Any, dtype: torch.dtype) -> torch.Tensor:
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

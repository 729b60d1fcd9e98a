"""NF4: frozen weights in 4 bits, by bitsandbytes, on real tensors and on tensors without values.

QLoRA (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314) keeps two weights in a byte, an 8-bit
scale for every 64 of them, and an fp32 scale for every 256 of those scales ("double quantization"):
4.127 bits per weight. A product writes the weight out in 16 bits first, and forgets it afterwards,
in the forward and in the backward pass.

On real tensors the layers are `bitsandbytes.nn.Linear4bit`. The library's class of weights cannot
be made of tensors without values, and its product hides what it allocates. So on those a subclass
does what the library's own code does for the products of training (bitsandbytes 0.50,
autograd/_functions.py and backends/cuda/ops.py).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from tight_fit.packages import needs
from tight_fit.techniques.compiled import compiling_when_called
from tight_fit.torch_private import FakeTensor, as_parameter, disable_current_modes, fake_of

BLOCK, BLOCK_OF_SCALES = 64, 256  # weights, and scales, that share a scale
CODES, CODES_OF_SCALES = 16, 256  # values in the tables of 4 and of 8 bits


def layers_of(model: PreTrainedModel) -> dict[str, Any]:
    """{name: layer} of the linear layers that are quantized: all of the model below its head.

    The head is a language model's output layer and what shares its weights, or a classifier, which
    is new and trains. Raises ValueError, in one sentence, where there are none, and where the
    blocks of 64 weights do not divide one.
    """
    kept = get_keys_to_not_convert(model)
    base = getattr(model, model.base_model_prefix, model)
    below = {id(module) for module in base.modules()}
    found: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and id(module) in below
        and should_convert_module(name, kept)
    }
    if not found:
        raise ValueError(
            f"base='nf4' quantizes linear layers, and {type(model).__name__} has none below its "
            "head: use base='bf16'."
        )
    for name, layer in found.items():
        if layer.weight.numel() % BLOCK:
            shape = " × ".join(map(str, layer.weight.shape))
            raise ValueError(
                f"base='nf4' quantizes blocks of {BLOCK} weights, which do not divide the {shape} "
                f"weights of {name}: use base='bf16'."
            )
    return found


def quantize(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Quantize the linear layers of a model to NF4 with double quantization, in place.

    The rest stays in its dtype. Scales and tables become buffers, so that whatever counts a model's
    tensors counts them.

    compute  dtype from which weights are quantized, and that of the products
    Raises what `layers_of` raises, and ModuleNotFoundError where bitsandbytes is missing.
    """
    layers = layers_of(model)
    needs("bitsandbytes")
    for name, layer in layers.items():
        weight, bias = layer.weight.data, layer.bias
        weight = weight.T.contiguous() if isinstance(layer, Conv1D) else weight
        weight = weight.to(compute)
        if bias is not None:
            bias.data = bias.data.to(compute)  # as the library does in the first forward pass
        make = _without_values if isinstance(weight, FakeTensor) else _real
        new = make(weight, bias, compute)
        for number, tensor in enumerate(state_tensors(new.quant_state)):
            new.register_buffer(f"quantization_{number}", tensor, persistent=False)
        model.set_submodule(name, new.requires_grad_(False))
    # peft asks for it, to put the adapters of its own class beside these layers.
    vars(model)["is_loaded_in_4bit"] = True


def rest_in_fp32(model: nn.Module) -> None:
    """Make what is not quantized fp32, in place, as peft's `prepare_model_for_kbit_training` does.

    The bias of a quantized layer stays as it is: its first forward pass would undo the change.
    """
    quantized = {
        id(parameter)
        for module in model.modules()
        if hasattr(module, "quant_state")
        for parameter in module.parameters(recurse=False)
    }
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in quantized:
            parameter.data = parameter.data.float()


def pack_in_compute_dtype(model: nn.Module) -> None:
    """Let the bytes of quantized weights be numbers of the products' dtype, in place.

    So does `bnb_4bit_quant_storage`. FSDP2 gathers the weights of a group in one dtype, to which it
    would cast bytes as if they were numbers.
    """
    for module in model.modules():
        if getattr(module, "quant_state", None) is not None:
            layer: Any = module
            packed = layer.weight.detach().view(-1).view(layer.quant_state.dtype)
            layer.weight = nn.Parameter(packed.unsqueeze(1), requires_grad=False)


def state_tensors(state: Any) -> list[torch.Tensor]:
    """What a quantized weight holds beside its bytes: scales, tables, the mean of the scales."""
    second = state.state2
    tensors = [state.absmax, state.code]
    return tensors + ([state.offset, second.absmax, second.code] if second is not None else [])


def count_parameters(model: nn.Module) -> int:
    """The number of a model's parameters, those in 4 bits counted as they were before."""
    total = 0
    for parameter in model.parameters():
        state: Any = getattr(parameter, "quant_state", None)
        total += math.prod(state.shape) if hasattr(state, "shape") else parameter.numel()
    return total


def _real(weight: torch.Tensor, bias: nn.Parameter | None, compute: torch.dtype) -> Any:
    layer = _layer_class()(
        weight.shape[1], weight.shape[0], bias is not None, compute, quant_type="nf4", device="meta"
    )
    kind: Any = type(layer.weight)
    layer.weight = kind(weight, requires_grad=False, quant_type="nf4", module=layer)
    layer.bias = bias
    layer.weight = layer.weight.to(weight.device)  # this quantizes it
    return layer


def _without_values(weight: FakeTensor, bias: nn.Parameter | None, compute: torch.dtype) -> Any:
    with compiling_when_called():
        from bitsandbytes.functional import QuantState

    scales, mode = weight.numel() // BLOCK, weight.fake_mode

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> FakeTensor:
        with disable_current_modes():
            return fake_of(mode, torch.empty(shape, dtype=dtype, device="meta"))

    second = QuantState(
        absmax=empty(-(-scales // BLOCK_OF_SCALES)),
        code=empty(CODES_OF_SCALES),
        blocksize=BLOCK_OF_SCALES,
        dtype=torch.float32,
    )
    state = QuantState(
        absmax=empty(scales, dtype=torch.uint8),
        shape=weight.shape,
        code=empty(CODES),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=weight.dtype,
        offset=empty(),
        state2=second,
    )
    packed: Any = as_parameter(empty(weight.numel() // 2, 1, dtype=torch.uint8))
    packed.compress_statistics, packed.quant_type = True, state.quant_type  # peft asks
    layer: Any = object.__new__(_layer_class())
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = state.shape
    layer.weight, layer.bias = packed, bias
    layer.quant_state = packed.quant_state = state
    layer.compute_dtype = compute
    return layer


@cache
def _layer_class() -> type:
    """The class of quantized layers; to import bitsandbytes takes seconds."""
    from bitsandbytes.nn import Linear4bit

    class ShownLinear4bit(Linear4bit):
        """A `Linear4bit` whose products show what they allocate, but on a GPU.

        There it is the library's own, which does the same for the many rows of a training step.
        """

        def _apply(self, fn, recurse=True):
            super()._apply(fn, recurse)
            # The weight takes its scales along when it moves: these buffers are the same tensors.
            weight: Any = self.weight
            for number, tensor in enumerate(state_tensors(weight.quant_state)):
                self._buffers[f"quantization_{number}"] = tensor
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.is_cuda:
                return super().forward(x)
            given = x.dtype
            x = x.to(self.compute_dtype)
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return Product4bit.apply(x, bias, self.weight, self.quant_state).to(given)

    return ShownLinear4bit


class Product4bit(torch.autograd.Function):
    """x W^T + b with W in 4 bits: W is written out for each product and kept for none.

    x [..., inputs] and b [outputs] in 16 or 32 bits; W as bitsandbytes packs it, with its
    `QuantState`.
    """

    @staticmethod
    def forward(ctx, x, bias, packed, state):
        from bitsandbytes.functional import dequantize_4bit

        ctx.packed, ctx.state = packed, state
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, dequantize_4bit(packed, state).to(x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient):
        from bitsandbytes.functional import dequantize_4bit

        for_x = for_bias = None
        if ctx.needs_input_grad[1]:
            for_bias = gradient.flatten(0, -2).sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            weight = dequantize_4bit(ctx.packed, ctx.state).to(gradient.dtype)
            for_x = torch.matmul(gradient, weight)
        return for_x, for_bias, None, None

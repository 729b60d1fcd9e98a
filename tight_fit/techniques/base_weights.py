"""Weights stored in fewer bits than fp32: bf16, or frozen NF4 beside adapters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tight_fit.techniques import four_bits
from tight_fit.techniques.settings import StepSettings


def store(model: PreTrainedModel, recipe: StepSettings, heads: Collection[str]) -> None:
    """Store the weights of a model as `recipe.base` says, in place; before adapters are added.

    With adapters the `heads`, parameters whose names begin so, are new and train in fp32. Without,
    all is bf16. Beside NF4 in fp16's autocast the rest is fp16. Buffers stay as they are. Raises
    what `four_bits.quantize` raises.
    """
    dtype = torch.float16 if recipe.precision == "fp16" else torch.bfloat16
    new = tuple(heads) if recipe.lora_rank is not None else ()
    for name, parameter in model.named_parameters():
        if not (new and name.startswith(new)):
            parameter.data = parameter.data.to(dtype)
    if recipe.base == "nf4":
        four_bits.quantize(model, dtype)
    if new:
        widen_heads(model, new)


def widen_heads(model: nn.Module, heads: Collection[str]) -> None:
    """Store the parameters whose names begin as one of `heads` in fp32, in place.

    Where autocast is off, what they are given is widened too.
    """
    for name, module in model.named_modules():
        if f"{name}.".startswith(tuple(heads)):
            own = list(module.parameters(recurse=False))
            for parameter in own:
                parameter.data = parameter.data.float()
            if own:
                module.register_forward_pre_hook(_in_dtype_of_weight)


def widen_adapters(model: nn.Module) -> None:
    """Store adapters in fp32, in place; peft makes them in the dtype of the layer beside them."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()


def _in_dtype_of_weight(module: nn.Module, args: tuple) -> tuple | None:
    """A head in fp32 after layers in bf16; autocast casts by itself."""
    weight: Any = module.weight
    if torch.is_autocast_enabled(weight.device.type) or args[0].dtype == weight.dtype:
        return None
    return args[0].to(weight.dtype), *args[1:]

"""Sizes of tensors, as a kernel sees them."""

from __future__ import annotations

from math import prod

import torch

from tight_fit.torch_private import tree_leaves

ARITHMETIC = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


def tensors(values) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's own elements; a dimension that was expanded (stride 0) is read once."""
    return (
        prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
        * tensor.element_size()
    )


def arithmetic(tensor: torch.Tensor) -> str:
    """The arithmetic of a tensor's numbers, as in `Op`; that of whole numbers counts as fp32."""
    return ARITHMETIC.get(tensor.dtype, "fp32")


def channels_last(images: torch.Tensor) -> bool:
    """Whether the channels of images lie side by side (memory_format=torch.channels_last)."""
    if images.dim() != 4 or images.shape[1] < 2:
        return False
    return images.is_contiguous(memory_format=torch.channels_last)

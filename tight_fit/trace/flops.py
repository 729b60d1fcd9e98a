"""Floating-point operations of what PyTorch runs: its own formulas, and those that it lacks.

PyTorch counts a product of two matrices, and what attention multiplies, from the shapes of their
arguments (`torch.utils.flop_counter`). Missing are attention on the CPU, the grouped products of
experts and, before PyTorch 2.13, attention with fewer heads of keys than of queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
KERNELS = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")


def _attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_, **__) -> int:
    return sdpa_flop_count(*_shapes(queries, keys, values))


def _attention_backward(
    gradient: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *_,
    **__,
) -> int:
    return sdpa_backward_flop_count(gradient.shape, *_shapes(queries, keys, values))


def _shapes(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Size, torch.Size, torch.Size]:
    """[batch, heads, tokens, width] of each; keys and values as if every head of queries had its
    own, as the products are those of every head of queries."""
    heads = queries.shape[-3]
    keys_shape, values_shape = (
        torch.Size((*shape[:-3], heads, *shape[-2:])) for shape in (keys.shape, values.shape)
    )
    return queries.shape, keys_shape, values_shape


def _grouped_products(left: torch.Tensor, right: torch.Tensor, *_, **__) -> int:
    """The products of all experts, each with its own rows or columns; every one is in one group."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


# {operation: its FLOPs from what it is called with, and its result as out_val}
FORMULAS: dict[object, Callable[..., int]] = {**flop_registry}
_OURS: dict[str, Callable[..., int]] = {"_grouped_mm": _grouped_products}
for _kernel in KERNELS:
    _OURS[f"_scaled_dot_product_{_kernel}"] = _attention
    _OURS[f"_scaled_dot_product_{_kernel}_backward"] = _attention_backward
FORMULAS |= {getattr(aten, name): count for name, count in _OURS.items()}

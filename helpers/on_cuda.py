"""What a GPU does differently, on fake CPU tensors.

Fake CUDA tensors need a torch built with CUDA, and a plan must come out the same on a laptop. So the planner runs on
fake CPU tensors, and this mode swaps the calls whose GPU kernels keep other tensors for the backward pass.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from helpers.recipe import Recipe

DROPOUT = {F.dropout, torch.dropout}
# Operations that autocast runs in fp32 on CUDA and in their input's type on a CPU, of those that models use
# ("CUDA Ops that can autocast to float32", https://docs.pytorch.org/docs/stable/amp.html).
FP32 = {F.layer_norm, torch.layer_norm, F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax,
        torch.log_softmax, torch.Tensor.log_softmax, F.cross_entropy, F.nll_loss, F.group_norm, torch.group_norm,
        F.softplus, torch.Tensor.__pow__} | {
            getattr(place, name) for place in (torch, torch.Tensor) for name in (
                "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt", "logsumexp", "cumsum", "cumprod")}


class OnCuda(TorchFunctionMode):
    """While active, dropout is the fused kernel, whose mask is one byte an element (a CPU keeps four), attention with
    dropout is a fused kernel, too, and under autocast the operations in `FP32` run in fp32. torch switches such a mode off during `backward`: a model that
    recomputes there must be told to enter it again (`models.empty(recipe, recompute=...)`)."""

    def __init__(self, recipe: Recipe, active: bool = True):
        super().__init__()
        self.active = active
        self.mixed = recipe.precision in ("bf16", "fp16")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.active and function in DROPOUT:
            return _dropout(*args, **kwargs)
        if self.active and function is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if self.active and self.mixed and function in FP32 and torch.is_autocast_enabled("cpu"):
            args = [_wide(value) for value in args]
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _dropout(input, p=0.5, training=True, inplace=False, train=None):
    training = training if train is None else train
    if not training or p == 0 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
    """GPUs' fused kernels draw dropout themselves and keep none of it; a CPU's kernel has none, so torch would write the
    attention probabilities out."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **rest)


def _wide(value):
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value

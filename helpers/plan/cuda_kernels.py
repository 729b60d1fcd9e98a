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
FP32 = {
    F.layer_norm,
    torch.layer_norm,
    F.softmax,
    torch.softmax,
    torch.Tensor.softmax,
    F.log_softmax,
    torch.log_softmax,
    torch.Tensor.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.group_norm,
    torch.group_norm,
    F.softplus,
    torch.Tensor.__pow__,
} | {
    getattr(place, name)
    for place in (torch, torch.Tensor)
    for name in (
        "exp",
        "expm1",
        "log",
        "log10",
        "log1p",
        "log2",
        "pow",
        "reciprocal",
        "rsqrt",
        "logsumexp",
        "cumsum",
        "cumprod",
    )
}


class CudaKernels(TorchFunctionMode):
    """While active, dropout is the fused kernel, whose mask is one byte an element (a CPU keeps four), attention with
    dropout is a fused kernel, too, and under autocast the operations in `FP32` run in fp32. torch switches such a mode off
    during `backward`: a model that recomputes there must be told to enter it again (`models.empty(recipe, recompute=...)`).

    fused  False: the card has no fused attention kernel for the type (bf16 before Ampere), so PyTorch writes attention out
    """

    def __init__(self, recipe: Recipe, active: bool = True, fused: bool = True):
        super().__init__()
        self.active = active
        self.mixed = recipe.precision in ("bf16", "fp16")
        self.attention = _attention if fused else _written_out

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.active and function in DROPOUT:
            return _dropout(*args, **kwargs)
        if self.active and function is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
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


def _written_out(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """PyTorch's "math" attention (`torch.nn.attention.SDPBackend.MATH`): 16-bit inputs are computed in fp32
    (`torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp` is off), and the probabilities are kept for the backward pass."""
    if enable_gqa:
        raise NotImplementedError(
            "Grouped queries written out are not planned: repeat keys and values first."
        )
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    with torch.autocast("cpu", enabled=False):
        query, key, value = (tensor.to(dtype).float() for tensor in (query, key, value))
        factor = (
            query.shape[-1] ** -0.5 if scale is None else scale
        ) ** 0.5  # on both sides, for the sake of small numbers
        query = query * factor
        if is_causal:
            attn_mask = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).tril()
        weights = query @ (key.transpose(-2, -1) * factor)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros(attn_mask.shape, device=query.device).masked_fill_(
                    ~attn_mask, -torch.inf
                )
            weights += attn_mask
        weights = (
            torch.softmax(weights, -1)
            if attn_mask is None
            else torch.ops.aten._safe_softmax(weights, -1)
        )
        weights = _dropout(weights, dropout_p)
        answer = (weights @ value).to(dtype)
        weights.to(dtype)  # PyTorch answers with the weights, too; nobody takes them
        return answer


def _wide(value):
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value

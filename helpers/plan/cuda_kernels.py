"""What a GPU does differently, on fake CPU tensors.

Fake CUDA tensors need a PyTorch built with CUDA, and a plan must come out the same on a laptop.
Therefore the planner runs on fake CPU tensors, and the mode defined here replaces the calls whose
GPU kernels keep other tensors for the backward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from helpers.recipe import StepSettings

DROPOUT = {F.dropout, torch.dropout}
# Operations that autocast runs in fp32 on CUDA and in the dtype of their input on a CPU; only those
# that models use ("CUDA Ops that can autocast to float32",
# https://docs.pytorch.org/docs/stable/amp.html).
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
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
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
    """While active, a step on CPU tensors keeps the tensors that it would keep on a GPU.

    Dropout is the fused kernel, whose mask takes one byte per element (a CPU keeps four). Attention
    with dropout is a fused kernel, too. Under autocast the operations in `FP32` run in fp32.
    PyTorch switches such a mode off during `backward`, so a model that recomputes activations there
    has to enter it again (`models.empty(recipe, recompute=...)`).

    settings  only the precision is read: "bf16" and "fp16" mean autocast
    active    False changes nothing
    fused     False: the GPU has no fused attention kernel for the dtype (bf16 before Ampere), and
              PyTorch computes attention as separate operations
    """

    def __init__(self, settings: StepSettings, active: bool = True, fused: bool = True):
        super().__init__()
        self.active = active
        self.mixed = settings.precision in ("bf16", "fp16")
        self.attention = _fused_attention if fused else _written_out

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.active and function in DROPOUT:
            return _dropout(*args, **kwargs)
        if self.active and function is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if self.active and self.mixed and function in FP32 and torch.is_autocast_enabled("cpu"):
            args = [_to_fp32(value) for value in args]
            kwargs = {name: _to_fp32(value) for name, value in kwargs.items()}
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _dropout(input, p=0.5, training=True, inplace=False, train=None):
    training = training if train is None else train
    if not training or p == 0 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _fused_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **other_options
):
    """Attention as GPUs' fused kernels compute it: they draw dropout themselves and keep no mask.

    The CPU's fused kernel has no dropout; PyTorch would compute attention as separate operations.
    """
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, **other_options
    )


def _written_out(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """PyTorch's "math" attention (`torch.nn.attention.SDPBackend.MATH`).

    16-bit inputs are computed in fp32, since
    `torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp` is off by default. The probabilities
    are kept for the backward pass. Raises NotImplementedError for grouped queries.
    """
    if enable_gqa:
        raise NotImplementedError(
            "Grouped queries are not planned without a fused kernel: repeat keys and values first."
        )
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    with torch.autocast("cpu", enabled=False):
        query, key, value = (tensor.to(dtype).float() for tensor in (query, key, value))
        # Half of the scale goes to each side, so that the products stay small.
        factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        query = query * factor
        if is_causal:
            shape = query.shape[-2], key.shape[-2]
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        weights = query @ (key.transpose(-2, -1) * factor)
        if attn_mask is None:
            weights = torch.softmax(weights, -1)
        else:
            if attn_mask.dtype == torch.bool:
                zeros = torch.zeros(attn_mask.shape, device=query.device)
                attn_mask = zeros.masked_fill_(~attn_mask, -torch.inf)
            weights += attn_mask
            weights = torch.ops.aten._safe_softmax(weights, -1)
        weights = _dropout(weights, dropout_p)
        output = (weights @ value).to(dtype)
        weights.to(dtype)  # PyTorch returns the weights as well, and they are dropped at once
        return output


def _to_fp32(value):
    """A 16-bit tensor in fp32; anything else as it is."""
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value

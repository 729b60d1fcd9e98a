"""What a GPU does differently, on fake CPU tensors.

Fake CUDA tensors need a PyTorch built with CUDA, and a plan must come out the same on a laptop.
Therefore the planner runs on fake CPU tensors, and the mode defined here replaces the calls whose
GPU kernels keep other tensors for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tight_fit.techniques.rules import GROUPED_SINCE
from tight_fit.techniques.settings import Precision
from tight_fit.torch_private import FUSED_ADAM, inside
from tight_fit.trace.releases import parse

Function = Callable[..., Any]
OWNERS = (torch, torch.Tensor, F, torch.special, torch.linalg)
DROPOUT = {F.dropout, torch.dropout}


def _named(names: str) -> frozenset[Function]:
    """Every public function and Tensor method of PyTorch with one of these names."""
    owned = ((owner, name) for name in names.split() for owner in OWNERS)
    return frozenset(getattr(owner, name) for owner, name in owned if hasattr(owner, name))


# What autocast runs in fp32 on CUDA ("CUDA Ops that can autocast to float32",
# https://docs.pytorch.org/docs/stable/amp.html, and AT_FORALL_FP32 of ATen/autocast_mode.h), most
# of it in the dtype of its input on a CPU. With PyTorch's other names for the same operations, and
# with those that it computes by one of them.
FP32 = _named(
    "acos arccos asin arcsin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow square softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm "
    "nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss cross_entropy "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp interpolate upsample "
    "__pow__ __rpow__ __rdiv__ __rtruediv__"
)
# Those to which autocast gives dtype=torch.float32 and the input as it is, so that the kernel casts
# (AT_FORALL_FP32_SET_OPT_DTYPE).
DTYPE_FP32 = _named("softmax log_softmax cumsum cumprod sum prod norm vector_norm matrix_norm")
# What only a CPU's autocast runs in fp32; on a GPU it runs in the dtype of its input.
AS_GIVEN = _named("avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d pad")
# What autocast runs in 16 bits on CUDA, and in the dtype of its input on a CPU.
LOW = _named("mv addmv addr prelu")
REFUSED = _named("binary_cross_entropy")
# PyTorch's fused attention kernels (ATen/native/transformers/cuda/sdp_utils.cpp). FlashAttention,
# from Ampere on, takes these dtypes, heads up to this width, and no mask.
FLASH = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256
# The memory-efficient one takes the others as well, and bf16 only from Ampere on. It does not
# repeat keys and values for grouped queries before PyTorch 2.14 (documentation of
# `scaled_dot_product_attention`, enable_gqa).
MEMORY_EFFICIENT = (torch.float16, torch.float32)
GROUPED = parse(None) >= GROUPED_SINCE


class CudaKernels(TorchFunctionMode):
    """While active, a step on CPU tensors keeps the tensors that it would keep on a GPU.

    Dropout is the fused kernel, whose mask takes one byte per element (a CPU keeps four). Attention
    is a fused kernel, too, with and without dropout, where the GPU has one for it; else PyTorch
    computes it as separate operations. Under autocast the operations in `FP32` and `DTYPE_FP32`
    run in fp32. PyTorch switches such a mode off inside its own functions, such as `backward`, so a
    model that recomputes activations there has to enter it again
    (`models.empty(recipe, recompute=...)`). Those in `OPENED` run with the mode on. Who asks
    `torch.is_autocast_enabled()` and names no device, as peft's 4-bit layers do before they cast
    their input, asks for CUDA's autocast and is told of the step's.

    settings  of the step: the precisions "bf16" and "fp16" mean autocast
    active    False changes nothing
    flash     whether the GPU has FlashAttention's kernel: from Ampere on (`GPU.bf16`). Where that
              kernel cannot be used, as in fp32, grouped queries have no fused one before PyTorch
              2.14; bf16 has none on a GPU without it
    Raises RuntimeError for binary_cross_entropy under autocast, as CUDA does.
    """

    def __init__(self, settings: Precision, active: bool = True, flash: bool = True):
        super().__init__()
        self.active = active
        self.mixed = settings.precision in ("bf16", "fp16")
        self.flash = flash
        self._told: list[Any] = []  # the answers on autocast, one for each time it was entered

    def __enter__(self):
        enabled = torch.is_autocast_enabled
        told = patch.object(
            torch, "is_autocast_enabled", lambda device_type="cpu": enabled(device_type)
        )
        if self.active:
            told.start()
        self._told.append(told)
        return super().__enter__()

    def __exit__(self, *exception):
        told = self._told.pop()
        if self.active:
            told.stop()
        return super().__exit__(*exception)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.active:
            return function(*args, **kwargs)
        if function in FUSED_ADAM:
            return function(*_shards(args), **kwargs)
        if function in OPENED:
            with self:
                return OPENED[function](*args, **kwargs)
        if function in DROPOUT:
            return _dropout(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if self.mixed and function in AUTOCAST and torch.is_autocast_enabled("cpu"):
            return _as_cuda_autocasts(function, args, kwargs)
        return function(*args, **kwargs)

    def _is_fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> bool:
        """Whether the GPU has one kernel for this attention.

        None has one where the last dimension of an operand or of the mask does not lie in one
        piece, as that of T5's position bias in some releases of transformers.
        """
        dtype, inputs = computed_in(query), (query, key, value)
        fused = dtype in MEMORY_EFFICIENT or (self.flash and dtype in FLASH)
        if isinstance(query, DTensor):  # the ring of context ranks has only fused kernels
            return fused
        read = inputs if attn_mask is None else (*inputs, attn_mask)
        if any(tensor.stride(-1) != 1 for tensor in read):
            return False
        if self.flash and attn_mask is None and dtype in FLASH and _flash_takes(*inputs, is_causal):
            return True
        if enable_gqa and key.shape[-3] != query.shape[-3] and not GROUPED:
            return False
        return fused

    def _attention(self, *args, **kwargs):
        attention = _fused_attention if self._is_fused(*args, **kwargs) else _written_out
        return attention(*args, **kwargs)


def _flash_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> bool:
    """Whether FlashAttention's kernel has these shapes, [..., tokens, width]."""
    widths = {tensor.shape[-1] for tensor in (query, key, value)}
    square = query.shape[-2] == key.shape[-2]
    return len(widths) == 1 and max(widths) <= FLASH_WIDTH and (square or not is_causal)


def _shards(lists: tuple) -> tuple:
    """A rank's own parts of what one kernel updates, parameters first; `lists` themselves where
    parameters, gradients and states do not all lie in the same way.

    DTensor updates the same parts, and asks before it what becomes of each of them: of hundreds of
    parameters that took a quarter of the time in which a layout is searched.
    """
    parameters, *others = lists
    if not all(isinstance(tensor, DTensor) for tensor in parameters):
        return lists
    for tensors in (some for some in others[:-1] if some):
        for parameter, tensor in zip(parameters, tensors, strict=True):
            if not isinstance(tensor, DTensor) or (
                (tensor.device_mesh, tensor.placements)
                != (parameter.device_mesh, parameter.placements)
            ):
                return lists
    return tuple(
        [inside(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        for tensors in lists
    )


def _as_cuda_autocasts(function: Function, args: tuple, kwargs: dict) -> Any:
    """The result of an operation of `AUTOCAST`, in the dtype that autocast gives it on CUDA."""
    if function in REFUSED:
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy is refused under autocast on a GPU: use "
            "binary_cross_entropy_with_logits."
        )
    dtype = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        if function in DTYPE_FP32:
            given = [value for value in (*args, kwargs.get("dtype")) if type(value) is torch.dtype]
            if not given and _is_low(args[0] if args else kwargs.get("input", kwargs.get("x"))):
                kwargs = kwargs | {"dtype": torch.float32}
        elif function in LOW:
            args = tuple(_to_low(value, dtype) for value in args)
            kwargs = {name: _to_low(value, dtype) for name, value in kwargs.items()}
        elif function in FP32 and "area" not in (*_strings(args), *_strings(kwargs.values())):
            args = tuple(_to_fp32(value) for value in args)
            kwargs = {name: _to_fp32(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def opened(function: Function) -> Function:
    """A copy of a Python function of PyTorch's that function modes see through.

    As a rule such a function hands itself to the modes, which are then off in its body: what it
    calls there escapes them. The copy does not ask for modes, so it runs with those that are on.
    """
    source: Any = function
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**source.__globals__, **dict.fromkeys(asks, lambda *tensors: False)}
    copy = FunctionType(
        source.__code__, names, source.__name__, source.__defaults__, source.__closure__
    )
    copy.__kwdefaults__ = source.__kwdefaults__
    return copy


AUTOCAST = FP32 | DTYPE_FP32 | AS_GIVEN | LOW | REFUSED
# They call dropout, attention, or operations that autocast runs in fp32. nn.MultiheadAttention and
# the layers of nn.Transformer are built on the first.
OPENED: dict[Function, Function] = {
    function: opened(function)
    for function in (
        F.multi_head_attention_forward,
        F.normalize,
        F.gumbel_softmax,
        F.softmin,
        F.gaussian_nll_loss,
        F.triplet_margin_with_distance_loss,
    )
}


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
    are kept for the backward pass. With grouped queries, keys and values are repeated first.
    """
    dtype = computed_in(query)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        query, key, value = (tensor.to(dtype).to(wide) for tensor in (query, key, value))
        # Half of the scale goes to each side, so that the products stay small.
        factor = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        query = query * factor
        if enable_gqa:
            key, value = (_repeated(tensor, query.shape[-3]) for tensor in (key, value))
        if is_causal:
            shape = query.shape[-2], key.shape[-2]
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        weights = query @ (key.transpose(-2, -1) * factor)
        if attn_mask is None:
            weights = torch.softmax(weights, -1)
        else:
            if attn_mask.dtype == torch.bool:
                zeros = torch.zeros(attn_mask.shape, dtype=wide, device=query.device)
                attn_mask = zeros.masked_fill_(~attn_mask, -torch.inf)
            weights += attn_mask
            weights = torch.ops.aten._safe_softmax(weights, -1)
        weights = _dropout(weights, dropout_p)
        output = (weights @ value).to(dtype)
        weights.to(dtype)  # PyTorch returns the weights as well, and they are dropped at once
        return output


def computed_in(query):
    """The dtype in which attention of this query is computed: autocast's, but for fp64."""
    autocast = torch.is_autocast_enabled("cpu") and query.dtype != torch.float64
    return torch.get_autocast_dtype("cpu") if autocast else query.dtype


def _repeated(tensor, heads):
    """Keys or values [..., fewer heads, tokens, width], each head as often as queries have it."""
    times = heads // tensor.shape[-3]
    return tensor if times == 1 else tensor.repeat_interleave(times, -3)


def _strings(values: Iterable[object]) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _is_low(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _to_fp32(value):
    """A 16-bit tensor in fp32; anything else as it is."""
    return value.float() if _is_low(value) else value


def _to_low(value, dtype):
    """A tensor of 16 or 32 bits in autocast's dtype; anything else as it is."""
    eligible = _is_low(value) or (isinstance(value, torch.Tensor) and value.dtype == torch.float32)
    return value.to(dtype) if eligible else value

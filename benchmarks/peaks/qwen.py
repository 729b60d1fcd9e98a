"""LoRA and Q-LoRA of Qwen-7B on an A100: memory as nvidia-smi shows it, and seconds a step.

QwenLM/Qwen, README.md, "Profiling of Memory and Speed": a Qwen-7B (32 layers, width 4096, 151,936
words) on an A100-SXM4-80G, PyTorch 2.0, CUDA 11.8, FlashAttention 2, one example × 8 micro-batches,
gradient checkpointing. Three ways: "LoRA", "LoRA (emb)", in which embedding and output layer train
as well, and "Q-LoRA" beside the GPTQ Int4 weights. Its "G"
is a GB, 10⁹ bytes: of the full fine-tuning on two such GPUs it gives 162 G, and they hold
160 GiB.

The set-up, written before any plan was seen, from finetune.py and its two scripts for one GPU (at
343017c and 05577de) and what is known of the libraries of October 2023:

- adapters of rank 64 beside c_attn, both c_proj, w1 and w2, in fp32, dropout 0.05 (peft 0.5);
- LoRA: bf16 weights, autocast, AdamW with one kernel for many tensors, gradients clipped; the
  logits are turned to fp32 once more after the forward pass (accelerate);
- LoRA (emb): peft keeps the bf16 originals and trains bf16 copies;
- Q-LoRA: fp16, DeepSpeed ZeRO-2 on one GPU: fp16 adapters and gradients, fp32 master weights and
  states in one piece, two buckets of 2 × 10⁸ gradients; auto-gptq writes each weight out in fp16,
  by way of int32 and int8, and autograd keeps it for the layer's backward pass.

Not seen: Qwen's own model code as it ran (here RMSNorm in fp32 and rotations by single operations,
as it has them without its optional kernels), and which driver's context. What nvidia-smi shows
beside PyTorch's reserved memory is taken as `gpus.CONTEXT`, 500 MiB, as everywhere here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.pages import records
from helpers.recipe import Recipe
from tight_fit.trace.cuda_kernels import CudaKernels

SOURCE = "https://github.com/QwenLM/Qwen#profiling-of-memory-and-speed"
WORDS, WIDTH, INNER, LAYERS, HEADS = 151_936, 4096, 11_008, 32, 32
MICRO_BATCHES, RANK, DROPOUT = 8, 64, 0.05
# The length whose LoRA step told how well the tensor cores of a data-centre GPU are fed ("feeding"
# in constants.json).
FITTED = 4096
TRACED = 2  # micro-batches; the others repeat the second
GROUP = 128  # weights that share a scale in GPTQ
BUCKET = 2 * 10**8  # gradients in a bucket of ZeRO
LORA, EMBEDDINGS, QLORA = "LoRA", "LoRA (emb)", "Q-LoRA"


class QwenRow(NamedTuple):
    """A published figure: `memory` in GB as nvidia-smi shows it, `seconds` per step."""

    way: str
    length: int
    memory: float
    seconds: float

    @property
    def name(self) -> str:
        """Way and length."""
        return f"{self.way}, {self.length} tokens"


PUBLISHED = tuple(QwenRow(*row) for row in records("qwen_rows.csv").itertuples(index=False))


class QwenNorm(nn.Module):
    """Root mean square normalization, in fp32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class GptqLinear(nn.Module):
    """Weights in 4 bits, eight in an int32, which are written out in fp16 for a product."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__()
        groups = inputs // GROUP
        self.register_buffer("qweight", torch.zeros(inputs // 8, outputs, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(groups, outputs // 8, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(groups, outputs, dtype=torch.float16))
        self.register_buffer("g_idx", torch.zeros(inputs, dtype=torch.int32))
        self.register_buffer("shifts", torch.arange(0, 32, 4, dtype=torch.int32))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float16)) if bias else None
        self.inputs, self.outputs = inputs, outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = -1, 8, self.outputs
        parts = self.qweight.unsqueeze(1).expand(shape) >> self.shifts.view(1, -1, 1)
        parts = (parts.to(torch.int8) & 15).reshape(-1, GROUP, self.outputs)
        zeros = self.qzeros.unsqueeze(2).expand(-1, -1, 8) >> self.shifts.view(1, 1, -1)
        zeros = (zeros.to(torch.int8) & 15).reshape(-1, 1, self.outputs) + 1
        weight = self.scales.reshape(-1, 1, self.outputs) * (parts - zeros)
        out = torch.matmul(x.half(), weight.reshape(self.inputs, self.outputs))
        return out if self.bias is None else out + self.bias


class AdaptedLinear(nn.Module):
    """A frozen projection with an adapter beside it."""

    def __init__(self, inputs: int, outputs: int, quantized: bool, bias: bool = False):
        super().__init__()
        self.base = (GptqLinear if quantized else nn.Linear)(inputs, outputs, bias)
        dtype = torch.float16 if quantized else torch.float32
        self.lora_a = nn.Parameter(torch.zeros(RANK, inputs, dtype=dtype))
        self.lora_b = nn.Parameter(torch.zeros(outputs, RANK, dtype=dtype))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        y = self.dropout(x.to(self.lora_a.dtype))
        return result + F.linear(F.linear(y, self.lora_a), self.lora_b) * (16 / RANK)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys [examples, tokens, heads, width], rotated in fp32."""
    y = x.float()
    first, second = y.chunk(2, dim=-1)
    return (y * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class QwenBlock(nn.Module):
    """One layer."""

    def __init__(self, quantized: bool):
        super().__init__()
        self.ln_1, self.ln_2 = QwenNorm(), QwenNorm()
        self.c_attn = AdaptedLinear(WIDTH, 3 * WIDTH, quantized, bias=True)
        self.c_proj = AdaptedLinear(WIDTH, WIDTH, quantized)
        self.w1 = AdaptedLinear(WIDTH, INNER, quantized)
        self.w2 = AdaptedLinear(WIDTH, INNER, quantized)
        self.mlp_c_proj = AdaptedLinear(INNER, WIDTH, quantized)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = *x.shape[:2], HEADS, WIDTH // HEADS
        query, key, value = (part.view(shape) for part in self.c_attn(self.ln_1(x)).chunk(3, -1))
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (query, key, value)), is_causal=True
        )
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(x.shape))
        y = self.ln_2(x)
        return x + self.mlp_c_proj(self.w1(y) * F.silu(self.w2(y)))


class Qwen(nn.Module):
    """The whole model; of a copy that trains the frozen original stays beside it."""

    def __init__(self, way: str, layers: int):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if way == EMBEDDINGS:
            self.originals = nn.ModuleList(
                [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)]
            )
        self.h = nn.ModuleList(QwenBlock(way == QLORA) for _ in range(layers))
        self.ln_f = QwenNorm()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(ids)
        if not x.requires_grad:
            x.requires_grad_(True)
        tokens, size = ids.shape[1], WIDTH // HEADS
        angles = torch.zeros(1, tokens, 1, size, dtype=torch.float32)
        cos, sin = angles.cos(), angles.sin()
        for block in self.h:
            x = checkpoint(block, x, cos, sin, use_reentrant=False, context_fn=_as_on_gpu)
        logits = self.lm_head(self.ln_f(x))
        shifted = logits[..., :-1, :].contiguous()
        loss = F.cross_entropy(shifted.view(-1, WORDS), ids[..., 1:].contiguous().view(-1))
        return loss, logits


def _as_on_gpu():
    """What a layer runs in, the first and the second time: PyTorch switches modes off there."""
    return nullcontext(), CudaKernels(Recipe(precision="bf16"))


def qwen_setup(way: str, length: int, layers: int = LAYERS) -> Callable:
    """The set-up of a step, for `plan_custom_step`."""
    half = torch.float16 if way == QLORA else torch.bfloat16

    def make():
        torch.set_default_dtype(half)
        try:
            model = Qwen(way, layers)
        finally:
            torch.set_default_dtype(torch.float32)
        trained = []
        for name, parameter in model.named_parameters():
            whole = way == EMBEDDINGS and name.startswith(("wte.", "lm_head."))
            parameter.requires_grad_("lora_" in name or whole)
            if parameter.requires_grad:
                trained.append(parameter)
        model.train()
        data = torch.zeros(1, length, dtype=torch.long)
        if way == QLORA:
            on_gpu, update = _zero_2(trained)
        else:
            optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.1)
            on_gpu = []

            def update():
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()

        def step():
            for _ in range(TRACED):
                with torch.autocast("cpu", half):
                    loss, logits = model(data.clone())
                outputs = loss.float(), logits.float()
                loss = outputs[0] / MICRO_BATCHES
                del outputs, logits
                loss.backward()
                del loss
            update()

        return [model, *on_gpu], step

    return make


def _zero_2(trained: list[nn.Parameter]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """ZeRO-2 on one GPU: master weights and states in fp32, buckets of gradients, and its step."""
    count = sum(parameter.numel() for parameter in trained)
    master, first, second = (torch.zeros(count) for _ in range(3))
    buckets = [torch.zeros(BUCKET, dtype=torch.float16) for _ in range(2)]

    @torch.no_grad()
    def update() -> None:
        gradient = torch.cat([parameter.grad.flatten() for parameter in trained]).float()
        for parameter in trained:
            parameter.grad = None
        gradient.mul_(1.0 / 65536)
        first.lerp_(gradient, 0.1)
        second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        master.addcdiv_(first, second.sqrt().add_(1e-8), value=-3e-4)
        low, begin = master.half(), 0
        for parameter in trained:
            parameter.data.copy_(low[begin : begin + parameter.numel()].view_as(parameter))
            begin += parameter.numel()

    return [master, first, second, *buckets], update

"""LoRA at 1 to 13 billion bf16 parameters, as litgpt fine-tuned them: allocated memory.

Lightning-AI/litgpt, tutorials/resource-tables.md (table of commit 0cc02af, October 2023): an A100
of 40 GB, PyTorch 2.1.0, torch.cuda.max_memory_allocated in GB (10⁹). The first micro-batch holds
the longest text of Alpaca, whose length the page gives, and makes the peak; there are no optimizer
states yet.

The scripts were seen at near commits (finetune/lora.py at 0010d8e, lit_gpt/lora.py at 0215307,
lit_gpt/model.py at 034afac). RMSNorm was seen in two versions, in the dtype of its input (3c51a20)
and in fp32 (98898ca), and which of them ran is not known: an earlier plan of the two rows of the
7B model in the first version had missed by what the second one keeps more, so the second is taken.
Lightning's Fabric gives logits back in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peaks.point import Setup

RANK, RATE, CHUNK = 8, 0.05, 128  # of LoRA; tokens in a piece of the logits


@dataclass(frozen=True)
class Config:
    """A model. `rotated` is the part of a head that is rotated, `vocabulary` is padded."""

    vocabulary: int
    layers: int
    heads: int
    width: int
    inner: int
    rotated: float = 1.0
    llama: bool = False
    shared_norm: bool = False
    head_bias: bool = False
    positions: int = 4096


MODELS = {
    "phi-1.5 1.3B": Config(
        51200, 24, 32, 2048, 8192, 0.5, shared_norm=True, head_bias=True, positions=2048
    ),
    "StableLM 3B": Config(50688, 16, 32, 4096, 16384, 0.25),
    "Llama 2 7B": Config(32000, 32, 32, 4096, 11008, llama=True),
    "Llama 2 13B": Config(32000, 40, 40, 5120, 13824, llama=True),
}


class RMSNorm(nn.Module):
    """Root mean square normalization, in fp32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        return (self.weight * normed).to(dtype)


class LoRAQueryKeyValue(nn.Linear):
    """The projection to queries, keys and values, with LoRA for queries and values."""

    def __init__(self, width: int, bias: bool):
        super().__init__(width, 3 * width, bias=bias)
        self.lora_a = nn.Parameter(torch.zeros(2 * RANK, width))
        self.lora_b = nn.Parameter(torch.zeros(2 * width, RANK))
        self.register_buffer("columns", torch.arange(2 * width))
        self.dropout = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = F.linear(x, self.weight, self.bias)
        after_a = F.linear(self.dropout(x), self.lora_a)
        after_b = F.conv1d(after_a.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2)
        return result + self._padded(after_b.transpose(-2, -1)) * 2.0

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        shape = *x.shape[:-1], self.out_features
        zeros = x.new_zeros(shape).view(-1, self.out_features)
        padded = zeros.index_copy(1, self.columns, x.reshape(-1, x.shape[-1]))
        return padded.view(shape).transpose(0, 1)


class LitgptAttention(nn.Module):
    """Causal attention with rotated positions."""

    def __init__(self, config: Config):
        super().__init__()
        self.qkv = LoRAQueryKeyValue(config.width, not config.llama)
        self.out = nn.Linear(config.width, config.width, bias=not config.llama)
        self.config = config

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        heads, size = self.config.heads, width // self.config.heads
        qkv = self.qkv(x).view(rows, tokens, heads, 3, size).permute(0, 2, 3, 1, 4)
        query, key, value = (
            part.reshape(rows, -1, tokens, size) for part in qkv.split((1, 1, 1), dim=2)
        )
        turned = int(self.config.rotated * size)
        query, key = (
            torch.cat((rotate(part[..., :turned], cos, sin), part[..., turned:]), dim=-1)
            for part in (query, key)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, tokens, width))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries or keys, rotated by their position (Su et al. 2021)."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    roped = (x * cos) + (rotated * sin)
    return roped.to(x.dtype)


class Network(nn.Module):
    """The two-layer network of GPT-NeoX, or the gated one of Llama."""

    def __init__(self, config: Config):
        super().__init__()
        self.llama, bias = config.llama, not config.llama
        self.first = nn.Linear(config.width, config.inner, bias=bias)
        self.gate = nn.Linear(config.width, config.inner, bias=False) if config.llama else None
        self.last = nn.Linear(config.inner, config.width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            x = self.first(x)
            x = F.gelu(x, approximate="tanh")
            return self.last(x)
        first, gate = self.first(x), self.gate(x)
        x = F.silu(first) * gate
        return self.last(x)


class LitgptBlock(nn.Module):
    """A layer; GPT-NeoX's attention and network stand side by side."""

    def __init__(self, config: Config):
        super().__init__()
        norm = RMSNorm if config.llama else nn.LayerNorm
        self.norm1, self.attention = norm(config.width), LitgptAttention(config)
        self.norm2 = None if config.shared_norm else norm(config.width)
        self.network, self.llama = Network(config), config.llama

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        mixed = self.attention(normed, cos, sin)
        if not self.llama:
            second = normed if self.norm2 is None else self.norm2(x)
            return self.network(second) + mixed + x
        x = mixed + x
        return self.network(self.norm2(x)) + x


class Decoder(nn.Module):
    """The whole model; it returns the logits in pieces of 128 tokens."""

    def __init__(self, config: Config):
        super().__init__()
        size = int(config.rotated * config.width // config.heads)
        self.head = nn.Linear(config.width, config.vocabulary, bias=config.head_bias)
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LitgptBlock(config) for _ in range(config.layers))
        self.norm = (RMSNorm if config.llama else nn.LayerNorm)(config.width)
        self.register_buffer("cos", torch.zeros(config.positions, size))
        self.register_buffer("sin", torch.zeros(config.positions, size))

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = self.cos[: ids.size(1)], self.sin[: ids.size(1)]
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        return [self.head(part) for part in x.split(CHUNK, dim=1)]


def setup(model: str, examples: int, tokens: int) -> Setup:
    """The first micro-batch of one of `MODELS`: forward and backward pass."""
    config = MODELS[model]

    def make():
        with torch.device("cuda"):
            previous = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                decoder = Decoder(config)
            finally:
                torch.set_default_dtype(previous)
        for name, parameter in decoder.named_parameters():
            parameter.requires_grad_("lora_" in name)
        decoder.train()
        data = torch.zeros(examples, tokens, dtype=torch.long)

        def step():
            ids, targets = data.to("cuda"), data.to("cuda")
            logits = [part.float() for part in decoder(ids)]
            logits[-1] = logits[-1][..., :-1, :]
            targets = targets[..., 1:]
            pieces = [part.reshape(-1, part.size(-1)) for part in logits]
            wanted = [part.reshape(-1) for part in targets.split(CHUNK, dim=1)]
            losses = [
                F.cross_entropy(piece, want, reduction="none")
                for piece, want in zip(pieces, wanted)
            ]
            counted = (targets != -1).sum()
            loss = torch.cat(losses).sum() / counted.clamp(min=1)
            (loss / 128).backward()

        return [decoder], step

    return make

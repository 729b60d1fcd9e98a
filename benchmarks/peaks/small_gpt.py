"""A GPT of 124 M parameters in six stages of a book's optimizations: reserved memory.

Sebastian Raschka, LLMs-from-scratch, ch05/10_llm-training-speed/README.md (commit 0636158) with its
scripts 00_orig.py (9a89948) and 01_opt_single_gpu.py (7bd2631): A100, PyTorch 2.6.0, `torch.cuda.
memory_reserved` in GiB after the first epoch. 1,024 tokens, 8 examples, AdamW.

Seen are the first script and the last; the stages between are assumed to change what their title
says. What is evaluated and generated without gradients between the steps is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peaks.point import Setup

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, RATE, EXAMPLES = 50257, 1024, 768, 12, 12, 0.1, 8


@dataclass(frozen=True)
class Variant:
    """What has been changed so far.

    kept_mask  each layer keeps the causal mask; else it is made in each forward pass
    fused      one kernel for AdamW
    bf16       weights in bf16
    native     PyTorch's own LayerNorm and GELU
    flash      queries, keys and values by one product, attention by PyTorch's fused kernel
    """

    kept_mask: bool = False
    fused: bool = True
    bf16: bool = True
    native: bool = True
    flash: bool = False


class Norm(nn.Module):
    """Layer normalization from single operations."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class TanhGelu(nn.Module):
    """GELU's approximation from single operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class WrittenOut(nn.Module):
    """Causal attention from single operations; three projections."""

    def __init__(self, kept_mask: bool):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(RATE)
        self.kept_mask = kept_mask
        if kept_mask:
            self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        shape = rows, tokens, HEADS, width // HEADS
        key, query, value = (
            layer(x).view(shape).transpose(1, 2) for layer in (self.key, self.query, self.value)
        )
        scores = query @ key.transpose(2, 3)
        if self.kept_mask:
            mask = self.mask.bool()[:tokens, :tokens]
        else:
            mask = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1).bool()
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ value).transpose(1, 2).reshape(rows, tokens, width))


class Flash(nn.Module):
    """Causal attention by PyTorch's fused kernel; one projection."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(x).view(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = qkv
        mixed = F.scaled_dot_product_attention(query, key, value, None, RATE, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(rows, tokens, width))


class SmallGPTBlock(nn.Module):
    """A layer with normalization before attention and before the two-layer network."""

    def __init__(self, stage: Variant):
        super().__init__()
        norm = partial(nn.LayerNorm, WIDTH) if stage.native else Norm
        self.attention = Flash() if stage.flash else WrittenOut(stage.kept_mask)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh") if stage.native else TanhGelu(),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.norm1, self.norm2 = norm(), norm()
        self.dropout = nn.Dropout(RATE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.norm1(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.norm2(x)
        x = self.network(x)
        x = self.dropout(x)
        return x + shortcut


class SmallGPT(nn.Module):
    """GPT-2's smallest size with an output layer of its own."""

    def __init__(self, stage: Variant):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(RATE)
        self.blocks = nn.Sequential(*(SmallGPTBlock(stage) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH) if stage.native else Norm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)


def setup(**changed: bool) -> Setup:
    """The step of a stage, by the fields of `Variant`: gradients are given up before the forward
    pass."""
    stage = Variant(**changed)

    def make():
        model = SmallGPT(stage).to("cuda")
        if stage.bf16:
            model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=5e-4, weight_decay=0.1, fused=stage.fused or None
        )
        ids = torch.zeros(EXAMPLES, LENGTH, dtype=torch.long)
        model.train()

        def step():
            optimizer.zero_grad()
            inputs, targets = ids.to("cuda"), ids.to("cuda")
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()

        return [model], step

    return make

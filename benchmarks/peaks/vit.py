"""ViTs on 224 × 224 pixels: two sources.

ViT-L/16 in six stages of a blog's optimizations, reserved memory:
Sebastian Raschka, pytorch-memory-optim, logs.md (commit 2d1ae1e) with the scripts 01 to 06 (commits
9fdec6a and bf4c065): A100, PyTorch 2.1.0.dev20230623, torch.cuda.max_memory_reserved in GB (10⁹) of
an epoch. Gradients are given up between the forward and the backward pass, or with accumulation
after the update. Fabric gives logits back in fp32.

torchvision's model is written anew; what is evaluated without gradients after the epoch is left
out. The nightly is older than https://github.com/pytorch/pytorch/pull/104898 (July 2023), so its
foreach Adam is that of PyTorch 2.0.

ViT-H/14 on torchao's page on low-bit optimizers (pytorch/ao,
torchao/prototype/low_bit_optim/README.md and benchmarks/benchmark_low_bit_adam.py, commit 03cf0ad,
autumn 2024, its PyTorch not stated, 2.3 or later): bf16 autocast, 8 images, RTX 4070 Ti SUPER,
torch.cuda.max_memory_allocated in GB (10⁹). Assumed is timm's vit_huge_patch14_224, which is
written anew, with 45 classes.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peaks.point import Setup

SIDE = 224  # pixels


class FusedAttention(nn.Module):
    """Attention by PyTorch's fused kernel, with one projection to queries, keys and values."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(x).reshape(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(query, key, value)
        x = x.transpose(1, 2).reshape(rows, tokens, width)
        return self.out(x)


class TupleAttention(nn.MultiheadAttention):
    """PyTorch's own layer, as torchvision calls it."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = super().forward(x, x, x, need_weights=False)
        return x


class ViTBlock(nn.Module):
    """A layer with normalization before attention and before the two-layer network."""

    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = attention
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.network(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) for images [examples, 3, 224, 224].

    attention  the class of its attention, made of width and heads
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        patch: int,
        classes: int,
        attention: type[FusedAttention | TupleAttention],
    ):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // patch) ** 2 + 1, width))
        blocks = (ViTBlock(width, attention(width, heads)) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(pixels), -1, -1), x], dim=1)
        x = x + self.positions
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


def ladder(
    examples: int,
    bf16: bool = False,
    fp16_autocast: bool = False,
    accumulation: int = 1,
    sgd: bool = False,
) -> Setup:
    """A step; with accumulation it is several micro-batches, and the update comes after the first.

    Loss and logits live on until the next ones replace them.
    """

    def make():
        model = ViT(1024, 24, 16, 16, 10, TupleAttention)
        if bf16:
            model = model.to(torch.bfloat16)
        model = model.cuda().train()
        if sgd:  # without momentum, as in the last stage
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
        scaler = torch.amp.GradScaler("cuda", enabled=fp16_autocast)
        pixels = torch.zeros(examples, 3, SIDE, SIDE)
        labels = torch.zeros(examples, dtype=torch.long)
        kept: dict[str, torch.Tensor] = {}

        def micro_batch(number: int) -> None:
            features, targets = pixels.to("cuda"), labels.to("cuda")
            context = torch.autocast("cuda", torch.float16) if fp16_autocast else nullcontext()
            with context:
                out = model(features.to(torch.bfloat16) if bf16 else features)
            kept["logits"] = out.float()
            kept["loss"] = F.cross_entropy(kept["logits"], targets) / accumulation
            if accumulation == 1:
                optimizer.zero_grad()
            scaler.scale(kept["loss"]).backward()
            if number == 0:
                scaler.step(optimizer)
                scaler.update()
                if accumulation > 1:
                    optimizer.zero_grad()

        def step():
            for number in range(accumulation):
                micro_batch(number)

        return [model], step

    return make


def huge(eight_bit: bool) -> Setup:
    """The step with autocast; gradients are given up after the update.

    With bitsandbytes' optimizer no device is named, so that everything counts as the GPU's: the
    optimizer compares devices, and a tensor without values is told to be on a GPU only outside it.
    """

    def make():
        model = ViT(1280, 32, 16, 14, 45, FusedAttention).train()
        model = model if eight_bit else model.cuda()
        if eight_bit:
            import bitsandbytes

            optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=True)
        pixels, labels = torch.zeros(8, 3, SIDE, SIDE), torch.zeros(8, dtype=torch.long)
        moved = torch.clone if eight_bit else torch.Tensor.cuda

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(moved(pixels)), moved(labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return [model], step

    return make

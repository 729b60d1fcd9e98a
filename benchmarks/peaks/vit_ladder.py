"""ViT-L/16 on 224 × 224 pixels in six stages of a blog's optimizations: reserved memory.

Sebastian Raschka, pytorch-memory-optim, logs.md (commit 2d1ae1e) with the scripts 01 to 06 (commits
9fdec6a and bf4c065): A100, PyTorch 2.1.0.dev20230623, torch.cuda.max_memory_reserved in GB (10⁹) of
an epoch. Gradients are given up between the forward and the backward pass, or with accumulation
after the update. Fabric gives logits back in fp32.

torchvision's model is written anew; what is evaluated without gradients after the epoch is left
out. The nightly is older than https://github.com/pytorch/pytorch/pull/104898 (July 2023), so its
foreach Adam is that of PyTorch 2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peaks.point import A100, Point, Setup

SOURCE = "https://github.com/rasbt/pytorch-memory-optim/blob/2d1ae1e/logs.md"
WIDTH, LAYERS, HEADS, PATCH, SIDE, CLASSES = 1024, 24, 16, 16, 224, 10


class LadderBlock(nn.Module):
    """A layer with normalization before attention and before the two-layer network."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = self.norm1(given)
        x, _ = self.attention(x, x, x, need_weights=False)
        x = x + given
        y = self.norm2(x)
        y = self.network(y)
        return x + y


class ViTLarge(nn.Module):
    """ViT-L/16 (Dosovitskiy et al. 2021) for images [examples, 3, 224, 224]."""

    def __init__(self):
        super().__init__()
        patches = (SIDE // PATCH) ** 2
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(torch.zeros(1, patches + 1, WIDTH))
        self.blocks = nn.Sequential(*(LadderBlock() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.token.expand(len(pixels), -1, -1), x], dim=1)
        x = x + self.positions
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


def setup(
    examples: int,
    bf16: bool = False,
    fp16_autocast: bool = False,
    accumulation: int = 1,
    make_optimizer: Callable = lambda parameters: torch.optim.Adam(parameters, lr=5e-5),
) -> Setup:
    """A step; with accumulation it is several micro-batches, and the update comes after the first.

    Loss and logits live on until the next ones replace them.
    """

    def make():
        model = ViTLarge()
        if bf16:
            model = model.to(torch.bfloat16)
        model = model.cuda().train()
        optimizer = make_optimizer(model.parameters())
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


def sgd(parameters) -> torch.optim.Optimizer:
    """SGD without momentum, as in the last stage."""
    return torch.optim.SGD(parameters, lr=0.01)


STAGES: tuple[tuple[str, float, Setup], ...] = (
    ("64 images, fp32", 26.79, setup(64)),
    ("64 images, fp16 autocast", 18.21, setup(64, fp16_autocast=True)),
    ("64 images, bf16 weights", 13.82, setup(64, bf16=True)),
    ("16 images, bf16 weights", 5.69, setup(16, bf16=True)),
    ("4 × 4 images, bf16 weights", 3.91, setup(4, bf16=True, accumulation=4)),
    (
        "4 × 4 images, bf16 weights, SGD",
        2.02,
        setup(4, bf16=True, accumulation=4, make_optimizer=sgd),
    ),
)
POINTS = tuple(
    Point(
        f"ViT-L/16, {name}",
        SOURCE,
        "2.1.0.dev20230623",
        A100,
        make,
        reserved=gb * 1e9,
        behaves="2.0",
    )
    for name, gb, make in STAGES
)

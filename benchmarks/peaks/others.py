"""Single published figures: fp16 and bf16 AMP of a large ViT, DDP, Trainer, two operations.

- torchao's page on low-bit optimizers (pytorch/ao, torchao/prototype/low_bit_optim/README.md and
  benchmarks/benchmark_low_bit_adam.py, commit 03cf0ad, autumn 2024, its PyTorch not stated, 2.3 or
  later): ViT-H with bf16 autocast, 8 images, RTX 4070 Ti SUPER, torch.cuda.max_memory_allocated in
  GB (10⁹). Assumed is timm's vit_huge_patch14_224, which is written anew, with 45 classes.
- PyTorch's recipe of ZeroRedundancyOptimizer (pytorch/tutorials, commit 01c6302, PyTorch 1.8):
  20 linear layers under DistributedDataParallel of two ranks, max_memory_allocated in MB (10⁶,
  rounded down) before and after the first step of Adam. The GPU is not stated.
- optimum-benchmark's report of RoBERTa for multiple choice (optimum-benchmark/cuda on the hub,
  commits a5d451b and e9b5a49, 2024, its PyTorch between 2.3 and 2.6): Trainer on an A10, fp32, two
  examples of one choice with 16 tokens, as in `benchmarks.published_peaks`.
- Liger-Kernel's benchmarks (benchmark/data/a100_all_benchmark_data.csv, commit bdbfead, January
  2025, its PyTorch not stated): forward and backward pass of transformers' RMSNorm and of PyTorch's
  cross entropy on an A100, in MiB; of each the row of the greatest size. Rows of swiglu and geglu
  are left out, as they hold what earlier rows of the same process had left behind: from 1,024 to
  2,048 tokens they grow by less than from 2,048 to 4,096.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import RobertaConfig, RobertaForMultipleChoice
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.peaks.point import A10, A100, RTX_4070_TI, V100, Point, Setup
from tight_fit.techniques import model_changes
from tight_fit.units import MIB

TORCHAO = "https://github.com/pytorch/ao/tree/03cf0ad/torchao/prototype/low_bit_optim"
LIGER = (
    "https://github.com/linkedin/Liger-Kernel/blob/bdbfead/benchmark/data/"
    "a100_all_benchmark_data.csv"
)
RECIPE = (
    "https://github.com/pytorch/tutorials/blob/01c6302/recipes_source/zero_redundancy_optimizer.rst"
)
OPTIMUM = "https://huggingface.co/datasets/optimum-benchmark/cuda/commit/e9b5a49865ab"
WIDTH, LAYERS, HEADS, PATCH, SIDE = 1280, 32, 16, 14, 224  # of ViT-H


class FusedAttention(nn.Module):
    """Attention by PyTorch's fused kernel, with one projection to queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(x).reshape(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        x = F.scaled_dot_product_attention(query, key, value)
        x = x.transpose(1, 2).reshape(rows, tokens, width)
        return self.out(x)


class ViTHugeBlock(nn.Module):
    """A layer with normalization before attention and before the two-layer network."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = FusedAttention()
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.network(self.norm2(x))


class ViTHuge(nn.Module):
    """ViT-H/14 (Dosovitskiy et al. 2021) for images [examples, 3, 224, 224] of 45 classes."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.Sequential(*(ViTHugeBlock() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, 45)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(pixels), -1, -1), x], dim=1)
        x = x + self.positions
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


def vit_huge(eight_bit: bool) -> Setup:
    """The step with autocast; gradients are given up after the update.

    With bitsandbytes' optimizer no device is named, so that everything counts as the GPU's: the
    optimizer compares devices, and a tensor without values is told to be on a GPU only outside it.
    """

    def make():
        model = ViTHuge().train() if eight_bit else ViTHuge().cuda().train()
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


def roberta() -> tuple[list, object]:
    """Trainer's default step: gradients are clipped, and given up after the update."""
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    with model_changes.quiet():
        model = RobertaForMultipleChoice(config).cuda().train()
    groups = [
        [value for value in model.parameters() if (value.dim() > 1) == matrix]
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=5e-5, weight_decay=0)
    ids, labels = torch.zeros(2, 1, 16, dtype=torch.long), torch.zeros(2, dtype=torch.long)

    def step():
        inputs = {"input_ids": ids.cuda(), "attention_mask": torch.ones_like(ids).cuda()}
        model(**inputs, labels=labels.cuda()).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()

    return [model], step


def rms_norm() -> tuple[list, object]:
    """transformers' RMSNorm of 2,048 rows of 32,768 bf16 elements; its weight is in fp32."""
    norm = LlamaRMSNorm(32768, 1e-6).cuda()
    x = torch.zeros(2048, 32768, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    gradient = torch.zeros_like(x)

    def step():
        norm(x).backward(gradient, retain_graph=True)

    return [norm, x, gradient], step


def cross_entropy() -> tuple[list, object]:
    """PyTorch's cross entropy of 16,384 rows of 131,072 fp32 logits."""
    logits = torch.zeros(16384, 131072, device="cuda", requires_grad=True)
    labels = torch.zeros(16384, dtype=torch.long, device="cuda")
    loss = nn.CrossEntropyLoss()

    def step():
        loss(logits, labels).backward(retain_graph=True)

    return [logits, labels], step


def linear_layers(update: bool) -> Setup:
    """The recipe's first step, with the update by Adam or without."""

    def make():
        model = nn.Sequential(*(nn.Linear(2000, 2000).to("cuda") for _ in range(20)))
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)

        def step():
            outputs = parallel(torch.zeros(20, 2000).to("cuda"))
            labels = torch.zeros(20, 2000).to("cuda")
            nn.MSELoss()(outputs, labels).backward()
            if update:
                optimizer.step()

        return [model], step

    return make


POINTS = (
    Point(
        "ViT-H/14, bf16 autocast, 8 images, fused AdamW",
        TORCHAO,
        "",
        RTX_4070_TI,
        vit_huge(False),
        allocated=12.94e9,
    ),
    Point(
        "ViT-H/14, bf16 autocast, 8 images, 8-bit AdamW",
        TORCHAO,
        "",
        RTX_4070_TI,
        vit_huge(True),
        allocated=8.31e9,
    ),
    Point("RoBERTa-base, 2 × 16", OPTIMUM, "", A10, roberta, 2516234240, 2730491904, steps=5),
    *(
        Point(
            f"20 linear layers, DDP, {name} the first update",
            RECIPE,
            "1.8",
            V100,
            linear_layers(update),
            allocated=(megabytes + 0.5) * 1e6,
            steps=1,
            behaves="1.8",
            ranks=2,
        )
        for name, update, megabytes in (("before", False, 992), ("after", True, 1697))
    ),
    Point("RMSNorm, 2048 × 32768", LIGER, "", A100, rms_norm, 2561 * MIB),
    Point("cross entropy, 16384 × 131072", LIGER, "", A100, cross_entropy, 40960.125 * MIB),
)

"""Steps of usual models, measured to the byte, with PyTorch's release and the script at hand.

torch-preflight 0.5.0 ships what its authors measured on a Tesla T4 with PyTorch 2.11
(tests/calibration/measured_peaks.json of its source distribution, written by measure_cuda.py beside
it): eight training steps with autocast and AdamW, each the second of its kind, with the allocated
and the reserved peak. Here are the same steps written anew. The script uses bf16 where PyTorch says
that the GPU can, and PyTorch says so of a T4, since it emulates bf16. The T4 has no fused attention
kernel for bf16, so attention is planned written out.

optimum-benchmark keeps the reports of its own tests
(https://huggingface.co/datasets/optimum-benchmark/cuda, commits 289e2d8d3939 for DeBERTa and
947897815a55 for ViT, of which we saw the reserved peak alone): transformers' Trainer, fp32, AdamW,
PyTorch 2.2 to 2.4 on an A10 (https://github.com/huggingface/optimum-benchmark,
scenarios/training/config.py, .github/workflows/test_api_cuda.yaml). The batches are tiny, so the
peak lies in the optimizer's step. It tests weights, gradients, states and AdamW's temporaries, and
hardly any activation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from benchmarks.peaks.point import Setup
from helpers import models
from helpers.plan import fake_batch
from helpers.recipe import Recipe
from tight_fit.techniques import model_changes


def text(model: str, examples: int, length: int) -> Setup:
    """A step of an encoder without a head, or of GPT-2 with its own loss.

    The loss of the encoder is the mean square of its last hidden states.

    model  transformers' name of its kind, of which the usual size is taken
    """
    language = model == "gpt2"

    def setup():
        with model_changes.quiet():
            kind = AutoModelForCausalLM if language else AutoModel
            made = kind.from_config(AutoConfig.for_model(model)).train()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-5, foreach=True)
        ids = torch.zeros(examples, length, dtype=torch.long)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = made(input_ids=ids, labels=ids) if language else made(input_ids=ids)
                loss = out.loss if language else out.last_hidden_state.float().square().mean()
            loss.backward()
            optimizer.step()

        return [made, ids], step

    return setup


def images(examples: int) -> Setup:
    """A step of ResNet-50 on images of 224 × 224 pixels."""

    def setup():
        model = ResNet50().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        pixels, labels = torch.zeros(examples, 3, 224, 224), torch.zeros(examples, dtype=torch.long)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(pixels), labels)
            loss.backward()
            optimizer.step()

        return [model, pixels, labels], step

    return setup


def trainer(kind: str, recipe: dict[str, Any], classes: int, labels: list[int]) -> Setup:
    """A step as Trainer takes it by default.

    Biases and norms are a group of their own; gradients are clipped, and given up after the update.

    kind    the class of transformers
    recipe  fields of the recipe whose configuration and batch are taken, at full size
    labels  shape of the labels
    """
    asked = Recipe(profile="full", **recipe)

    def setup():
        config = models.config(asked)
        config.num_labels = classes
        with model_changes.quiet():
            model = getattr(transformers, kind)(config).train()
        groups = [
            [value for value in model.parameters() if (value.dim() > 1) == matrix]
            for matrix in (True, False)
        ]
        optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups], lr=5e-5, weight_decay=0.0, foreach=True
        )

        def step():
            model(  # no name keeps the batch, which is given up before the update
                **fake_batch(model, asked) | {"labels": torch.zeros(labels, dtype=torch.long)}
            ).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            model.zero_grad()

        return [model], step

    return setup


class ResNet50(nn.Sequential):
    """ResNet-50 (He et al. 2015) as in torchvision, 25,557,032 parameters.

    Unlike in the paper the stride is in the 3 × 3 convolution. Input: [examples, 3, 224, 224].
    """

    def __init__(self):
        blocks, width = [], 64
        for count, inner, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
            for number in range(count):
                blocks.append(Bottleneck(width, inner, stride if number == 0 else 1))
                width = 4 * inner
        super().__init__(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 1000),
        )


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut.

    width, inner  channels of the input and between the convolutions; the output has 4 * inner
    """

    def __init__(self, width: int, inner: int, stride: int):
        super().__init__()
        self.narrow = nn.Conv2d(width, inner, 1, bias=False)
        self.narrow_norm = nn.BatchNorm2d(inner)
        self.middle = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.middle_norm = nn.BatchNorm2d(inner)
        self.wide = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.wide_norm = nn.BatchNorm2d(4 * inner)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if width != 4 * inner:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.narrow_norm(self.narrow(x)))
        out = self.relu(self.middle_norm(self.middle(out)))
        out = self.wide_norm(self.wide(out))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)

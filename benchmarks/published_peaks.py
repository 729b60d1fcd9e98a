"""The plan against real GPUs: peaks that others measured and published to the byte, planned here.

torch-preflight 0.5.0 ships what its authors measured on a Tesla T4 with PyTorch 2.11 (tests/calibration/measured_peaks.json
of its source distribution, written by measure_cuda.py beside it; https://pypi.org/project/torch-preflight/0.5.0/): eight
training steps with autocast and AdamW, each the second of its kind, allocated and reserved peak. Below are the figures, and the
same steps in our words. The script takes bf16 where PyTorch says that the card can, and of a T4 it says so, since it emulates
it; a fused attention kernel for bf16 the T4 has not, so attention is planned written out.

optimum-benchmark keeps the reports of its own tests (https://huggingface.co/datasets/optimum-benchmark/cuda, commits 289e2d8d3939
for DeBERTa and 947897815a55 for ViT, where we saw the reserved peak alone): transformers' Trainer, fp32, AdamW, PyTorch 2.2 to 2.4
on an A10 (https://github.com/huggingface/optimum-benchmark, scenarios/training/config.py, .github/workflows/test_api_cuda.yaml). The
batches are tiny, so the peak lies in the optimizer's step: weights, gradients, states and AdamW's temporaries are tried, and hardly
an activation.

`python -m benchmarks.published_peaks` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from accelerate.commands.estimate import estimate_training_usage
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DebertaV2ForTokenClassification,
    DistilBertConfig,
    GPT2Config,
    PreTrainedModel,
    ViTForImageClassification,
)

from helpers import models
from helpers.gpus import GPU, find
from helpers.memory.allocator import AllocatorPeaks
from helpers.plan.custom_step import CustomStepPlan, plan_custom_step
from helpers.plan.planner import fake_batch
from helpers.recipe import Recipe
from helpers.tables import Table
from helpers.units import GIB, size

T4, A10 = find("T4"), GPU("A10", 24 * GIB, (8, 6))


@dataclass(frozen=True)
class Published:
    """A measured step.

    allocated, reserved  its peaks in bytes; allocated is None where we saw none
    parameters           their number
    preflight            the error that torch-preflight publishes of its own estimate of the same step (of reserved memory and
                         CUDA context together), None where it gives none
    setup                how to make it, for `plan_custom_step`
    mixed                bf16 autocast, else fp32
    """

    name: str
    allocated: int | None
    reserved: int
    parameters: int
    preflight: float | None
    setup: Callable
    gpu: GPU = T4
    mixed: bool = True

    def plan(self) -> CustomStepPlan:
        return plan_custom_step(self.setup, mixed=self.mixed, fused_attention=self.gpu.bf16)


def _text(config, rows: int, length: int, language: bool = False):
    """A bare encoder whose loss is the mean square of its last hidden states, or a language model with its own loss."""

    def setup():
        with models.quiet():
            model = (AutoModelForCausalLM if language else AutoModel).from_config(config()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
        ids = torch.zeros(rows, length, dtype=torch.long)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(input_ids=ids, labels=ids) if language else model(input_ids=ids)
                loss = out.loss if language else out.last_hidden_state.float().square().mean()
            loss.backward()
            optimizer.step()

        return [model, ids], step

    return setup


def _pictures(rows: int):
    def setup():
        model = ResNet50().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        pixels, labels = torch.zeros(rows, 3, 224, 224), torch.zeros(rows, dtype=torch.long)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(pixels), labels)
            loss.backward()
            optimizer.step()

        return [model, pixels, labels], step

    return setup


def _trainer(kind: type[PreTrainedModel], recipe: Recipe, classes: int, labels: tuple[int, ...]):
    """A step as Trainer takes it by default: biases and norms are a group of their own, gradients are clipped, and then let go."""

    def setup():
        config = models.config(recipe)
        config.num_labels = classes
        with models.quiet():
            model = kind(config).train()
        groups = [
            [value for value in model.parameters() if (value.dim() > 1) == matrix]
            for matrix in (True, False)
        ]
        optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups], lr=5e-5, weight_decay=0.0, foreach=True
        )

        def step():
            model(
                **fake_batch(model, recipe) | {"labels": torch.zeros(labels, dtype=torch.long)}
            ).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            model.zero_grad()

        return [model], step

    return setup


class ResNet50(nn.Sequential):
    """He et al. 2015 as torchvision has it, stride in the 3 × 3 convolution: 25,557,032 parameters."""

    def __init__(self):
        stages, width = [], 64
        for count, inner, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
            for place in range(count):
                stages.append(Bottleneck(width, inner, stride if place == 0 else 1))
                width = 4 * inner
        super().__init__(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 1000),
        )


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int):
        super().__init__()
        self.narrow, self.narrow_norm = (
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
        )
        self.middle, self.middle_norm = (
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
        )
        self.wide, self.wide_norm = (
            nn.Conv2d(inner, 4 * inner, 1, bias=False),
            nn.BatchNorm2d(4 * inner),
        )
        self.relu = nn.ReLU(inplace=True)
        self.aside = (
            None
            if width == 4 * inner
            else nn.Sequential(
                nn.Conv2d(width, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.narrow_norm(self.narrow(x)))
        out = self.relu(self.middle_norm(self.middle(out)))
        out = self.wide_norm(self.wide(out))
        out += x if self.aside is None else self.aside(x)
        return self.relu(out)


STEPS = (
    Published(
        "GPT-2, 4 × 128",
        2705153536,
        3042967552,
        124439808,
        0.025,
        _text(GPT2Config, 4, 128, language=True),
    ),
    Published(
        "GPT-2, 8 × 256",
        5736883712,
        6092226560,
        124439808,
        -0.124,
        _text(GPT2Config, 8, 256, language=True),
    ),
    Published(
        "BERT-base, 4 × 128", 2209738240, 2483027968, 109482240, -0.021, _text(BertConfig, 4, 128)
    ),
    Published(
        "BERT-base, 8 × 256", 3185408000, 3491758080, 109482240, -0.017, _text(BertConfig, 8, 256)
    ),
    Published(
        "DistilBERT, 4 × 128",
        1354818048,
        1501560832,
        66362880,
        -0.034,
        _text(DistilBertConfig, 4, 128),
    ),
    Published(
        "DistilBERT, 8 × 256",
        1757328384,
        1954545664,
        66362880,
        -0.004,
        _text(DistilBertConfig, 8, 256),
    ),
    Published("ResNet-50, 16 pictures", 1119203840, 1195376640, 25557032, 0.056, _pictures(16)),
    Published("ResNet-50, 32 pictures", 1839903232, 2000683008, 25557032, 0.014, _pictures(32)),
    Published(
        "DeBERTa-v3-base, 2 × 16",
        3702955520,
        3948937216,
        183833090,
        None,
        _trainer(
            DebertaV2ForTokenClassification,
            Recipe(profile="full", batch_size=2, length=16),
            2,
            (2, 16),
        ),
        A10,
        mixed=False,
    ),
    Published(
        "ViT-B/16, 2 pictures",
        None,
        1956642816,
        86567656,
        None,
        _trainer(
            ViTForImageClassification, Recipe("vit", profile="full", batch_size=2), 1000, (2,)
        ),
        A10,
        mixed=False,
    ),
)


def table(done: Sequence[tuple[Published, CustomStepPlan, AllocatorPeaks]]) -> Table:
    """A row a step with its plan: both peaks as measured and as planned, and what two other estimators miss by."""
    rows = []
    for step, made, found in done:
        fixed = max(
            estimate_training_usage(
                4 * step.parameters, "float16" if step.mixed else "float32"
            ).values()
        )
        rows.append(
            {
                "step": step.name,
                "card": step.gpu.name,
                "allocated": size(step.allocated) if step.allocated else "not seen",
                "planned": size(found.allocated)
                + (f" ({off(found.allocated, step.allocated)})" if step.allocated else ""),
                "its tensors alone": off(made.peak, step.allocated),
                "reserved": size(step.reserved),
                "reserved, planned": f"{size(found.reserved)} ({off(found.reserved, step.reserved)})",
                "torch-preflight": "-" if step.preflight is None else f"{step.preflight:+.1%}",
                "accelerate estimate-memory": off(fixed, step.allocated),
            }
        )
    return Table(rows)


def allocator_peaks(step: Published) -> tuple[CustomStepPlan, AllocatorPeaks]:
    """The step planned, and what the allocator makes of it on the card."""
    made = step.plan()
    return made, made.allocator_peaks(step.gpu)


@lru_cache(maxsize=1)
def planned() -> tuple[tuple[Published, CustomStepPlan, AllocatorPeaks], ...]:
    """All of them, planned once in this process."""
    return tuple((step, *allocator_peaks(step)) for step in STEPS)


def off(found: int, truth: int | None) -> str:
    return f"{found / truth - 1:+.2%}" if truth else "-"


if __name__ == "__main__":
    print(table(planned()))

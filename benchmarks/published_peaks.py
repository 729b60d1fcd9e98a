"""The plan against real GPUs: peaks that others measured and published to the byte, planned here.

torch-preflight 0.5.0 ships what its authors measured on a Tesla T4 with PyTorch 2.11
(tests/calibration/measured_peaks.json of its source distribution, written by measure_cuda.py beside
it): eight training steps with autocast and AdamW, each the second of its kind, with the allocated
and the reserved peak. Below are these figures, and the same steps written anew. The script uses
bf16 where PyTorch says that the GPU can, and PyTorch says so of a T4, since it emulates bf16. The
T4 has no fused attention kernel for bf16, so attention is planned written out.

optimum-benchmark keeps the reports of its own tests
(https://huggingface.co/datasets/optimum-benchmark/cuda, commits 289e2d8d3939 for DeBERTa and
947897815a55 for ViT, of which we saw the reserved peak alone): transformers' Trainer, fp32, AdamW,
PyTorch 2.2 to 2.4 on an A10 (https://github.com/huggingface/optimum-benchmark,
scenarios/training/config.py, .github/workflows/test_api_cuda.yaml). The batches are tiny, so the
peak lies in the optimizer's step. It tests weights, gradients, states and AdamW's temporaries, and
hardly any activation.

`benchmarks.peaks` plans them with all other published peaks and writes docs/accuracy.md.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    PretrainedConfig,
    PreTrainedModel,
    ViTForImageClassification,
)

from benchmarks.peaks.point import A10, T4, Point, Setup
from helpers import models
from helpers.plan import fake_batch
from helpers.recipe import Recipe
from helpers.tables import Table
from tight_fit.memory.allocator import AllocatorPeaks
from tight_fit.plans.own_step import CustomStepPlan
from tight_fit.techniques import model_changes
from tight_fit.units import size

PREFLIGHT = "torch-preflight 0.5.0 on PyPI, tests/calibration/measured_peaks.json"
OPTIMUM = "https://huggingface.co/datasets/optimum-benchmark/cuda"


def _text(config: type[PretrainedConfig], examples: int, length: int) -> Setup:
    """A step of an encoder without a head, or of a language model with its own loss.

    The loss of the encoder is the mean square of its last hidden states.
    """

    language = config is GPT2Config

    def setup():
        with model_changes.quiet():
            model = (AutoModelForCausalLM if language else AutoModel).from_config(config()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
        ids = torch.zeros(examples, length, dtype=torch.long)

        def step():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(input_ids=ids, labels=ids) if language else model(input_ids=ids)
                loss = out.loss if language else out.last_hidden_state.float().square().mean()
            loss.backward()
            optimizer.step()

        return [model, ids], step

    return setup


def _images(examples: int) -> Setup:
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


def _trainer(
    kind: type[PreTrainedModel], recipe: Recipe, classes: int, labels: tuple[int, ...]
) -> Setup:
    """A step as Trainer takes it by default.

    Biases and norms are a group of their own; gradients are clipped, and given up after the update.

    labels  shape of the labels
    """

    def setup():
        config = models.config(recipe)
        config.num_labels = classes
        with model_changes.quiet():
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


# name, allocated and reserved bytes, parameters, the error that torch-preflight publishes of its
# own estimate (reserved memory and CUDA context together), the step
ON_T4 = (
    ("GPT-2, 4 × 128", 2705153536, 3042967552, 124439808, 0.025, _text(GPT2Config, 4, 128)),
    ("GPT-2, 8 × 256", 5736883712, 6092226560, 124439808, -0.124, _text(GPT2Config, 8, 256)),
    ("BERT-base, 4 × 128", 2209738240, 2483027968, 109482240, -0.021, _text(BertConfig, 4, 128)),
    ("BERT-base, 8 × 256", 3185408000, 3491758080, 109482240, -0.017, _text(BertConfig, 8, 256)),
    (
        "DistilBERT, 4 × 128", 1354818048, 1501560832, 66362880, -0.034,
        _text(DistilBertConfig, 4, 128),
    ),
    (
        "DistilBERT, 8 × 256", 1757328384, 1954545664, 66362880, -0.004,
        _text(DistilBertConfig, 8, 256),
    ),
    ("ResNet-50, 16 images", 1119203840, 1195376640, 25557032, 0.056, _images(16)),
    ("ResNet-50, 32 images", 1839903232, 2000683008, 25557032, 0.014, _images(32)),
)  # fmt: skip
TAGS = Recipe(profile="full", batch_size=2, length=16)
ON_A10 = (  # of ViT the allocated bytes were not seen
    (
        "DeBERTa-v3-base, 2 × 16", 3702955520, 3948937216, 183833090, None,
        _trainer(DebertaV2ForTokenClassification, TAGS, 2, (2, 16)),
    ),
    (
        "ViT-B/16, 2 images", None, 1956642816, 86567656, None,
        _trainer(
            ViTForImageClassification, Recipe("vit", profile="full", batch_size=2), 1000, (2,)
        ),
    ),
)  # fmt: skip
STEPS = tuple(
    Point(name, source, release, gpu, setup, allocated, reserved, steps=steps)
    for rows, source, release, gpu, steps in (
        (ON_T4, PREFLIGHT, "2.11", T4, 2),
        (ON_A10, OPTIMUM, "2.2 to 2.4", A10, 5),
    )
    for name, allocated, reserved, _, _, setup in rows
)
PARAMETERS = {name: count for name, _, _, count, *_ in ON_T4 + ON_A10}
OWN_ERRORS = {name: error for name, _, _, _, error, _ in ON_T4 + ON_A10}


def table(planned: Sequence[tuple[Point, CustomStepPlan, AllocatorPeaks]]) -> Table:
    """A row per step: both peaks measured and planned, and what two other estimators miss by."""
    rows = []
    for step, plan, peaks in planned:
        precision = "float16" if step.gpu is T4 else "float32"
        weights, error = 4 * PARAMETERS[step.name], OWN_ERRORS[step.name]
        accelerate = max(estimate_training_usage(weights, precision).values())
        allocated = size(peaks.allocated)
        if step.allocated:
            allocated += f" ({off(peaks.allocated, step.allocated)})"
        rows.append(
            {
                "step": step.name,
                "GPU": step.gpu.name,
                "allocated": size(step.allocated) if step.allocated else "not seen",
                "planned": allocated,
                "its tensors alone": off(plan.peak, step.allocated),
                "reserved": size(step.reserved),
                "reserved, planned": f"{size(peaks.reserved)} "
                f"({off(peaks.reserved, step.reserved)})",
                "torch-preflight": "-" if error is None else f"{error:+.1%}",
                "accelerate estimate-memory": off(accelerate, step.allocated),
            }
        )
    return Table(rows)


def allocator_peaks(step: Point) -> tuple[CustomStepPlan, AllocatorPeaks]:
    """(the plan of the step, the peaks of the allocator on its GPU by that plan)."""
    plan = step.plan()
    return plan, plan.allocator_peaks(step.gpu)


def off(estimate: float, truth: float | None) -> str:
    """By how much an estimate is off, as a percentage; "-" where the truth is not known."""
    return f"{estimate / truth - 1:+.2%}" if truth else "-"

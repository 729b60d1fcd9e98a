"""Pretrain the mini ViT on drawn digits and write `helpers/mini/vit/`: backbone, processor, card.

    python -m tools.pretrain.pretrain_vit [--out DIR] [--steps N]

The architecture is that of Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020), made small.
As there, pretraining is supervised and uses other images than the task: digits drawn from the fonts
of matplotlib (`fonts`), to be fine-tuned on handwriting. The head is thrown away, so the checkpoint
is a backbone, as google/vit-base-patch16-224-in21k is.

There are three channels although digits are grey. That costs 3,072 of 453,984 parameters, and the
mini model then takes the same RGB images through the same processor as the full one, CIFAR-10
included. With one thread and a fixed seed, the weights are the same on every run on one kind of
CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from helpers.models import MINI
from tight_fit.command.wrapper import run as run_command
from tools.pretrain import card, fonts, loop, score

FOLDER = MINI / "vit"


@dataclass(frozen=True)
class ImagePretraining(loop.Pretraining):
    """One pretraining run on `pictures` drawn images of digits, `batch` of them per step."""

    weight_decay: float = 0.05
    batch: int = 64
    pictures: int = 60_000


def config() -> ViTConfig:
    """16 x 16 pixels in 4 x 4 patches: 16 tokens and [CLS]; 4 layers, hidden size 96, 4 heads."""
    return ViTConfig.from_pretrained(FOLDER)


def processor() -> ViTImageProcessorPil:
    """Any image to RGB, 16 x 16 pixels, values from -1 to 1; needs no torchvision.

    The processing is that of google/vit-base-patch16-224-in21k.
    """
    return ViTImageProcessorPil.from_pretrained(FOLDER)


def train(plan: ImagePretraining, stop: int | None = None) -> tuple[ViTModel, list[float]]:
    """(backbone, losses of each step), in fp32, by cross entropy on ten digits.

    stop  the number of steps to take of plan.steps; None takes all
    """
    images, digits = map(torch.from_numpy, fonts.sample(plan.pictures, plan.seed))
    torch.manual_seed(plan.seed)
    shape = config()
    shape.num_labels = 10
    model = ViTForImageClassification(shape).train()

    def losses() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            numbers = torch.randint(len(images), (plan.batch,))
            pixels = (images[numbers, None].float() / 127.5 - 1).expand(-1, 3, -1, -1)
            logits = model(pixels).logits
            yield {"loss": torch.nn.functional.cross_entropy(logits, digits[numbers])}

    log = loop.optimize(model, losses(), plan, stop)
    return model.vit, [step["loss"] for step in log]


def store(backbone: ViTModel, folder: Path) -> None:
    """Write the backbone in fp16 without a head, and preprocessor_config.json."""
    backbone.config = config()
    backbone.half().save_pretrained(folder)
    processor().save_pretrained(folder)


def main() -> None:
    """Pretrain, score and write the mini ViT."""
    words = "Pretrain the mini ViT on digits drawn from fonts."
    plan, out = card.asked(words, FOLDER, ImagePretraining())
    begin = time.perf_counter()
    backbone, log = train(plan)
    seconds = round(time.perf_counter() - begin)
    store(backbone, out)
    fine_tune = partial(score.score, out, score.digits(out), **score.IMAGE)
    content = {
        "fonts": len(fonts.names()),
        "matplotlib": matplotlib.__version__,
        "seconds": seconds,
        "first_losses": log[:20],
        "last_loss": round(sum(log[-100:]) / len(log[-100:]), 4),
        "fine_tune": score.IMAGE,
        "scores": score.against_random(fine_tune, (60, 100)),
    }
    card.write(out, "vit", backbone, plan, content)


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m tools.pretrain.pretrain_vit"))

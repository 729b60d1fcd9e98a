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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import matplotlib
import torch
from transformers import (
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    get_linear_schedule_with_warmup,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from helpers.models import MINI
from tight_fit.command.wrapper import run as run_command
from tools.pretrain import card, fonts, loop, score

FOLDER = MINI / "vit"


@dataclass(frozen=True)
class ImagePretraining:
    """One pretraining run on `pictures` drawn images of digits, `batch` of them per step."""

    steps: int = 1000
    batch: int = 64
    pictures: int = 60_000
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    seed: int = 0


def config() -> ViTConfig:
    """16 x 16 pixels in 4 x 4 patches: 16 tokens and [CLS]; 4 layers, hidden size 96, 4 heads."""
    return ViTConfig(
        image_size=fonts.SIZE, patch_size=4, num_channels=3, hidden_size=96, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=384, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def processor() -> ViTImageProcessorPil:
    """Any image to RGB, 16 x 16 pixels, values from -1 to 1; needs no torchvision.

    The processing is that of google/vit-base-patch16-224-in21k.
    """
    size = {"height": fonts.SIZE, "width": fonts.SIZE}
    return ViTImageProcessorPil(
        size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_convert_rgb=True
    )


def train(plan: ImagePretraining, stop: int | None = None) -> tuple[ViTModel, list[float]]:
    """(backbone, losses of each step), in fp32, by cross entropy on ten digits.

    stop  the number of steps to take of plan.steps; None takes all
    """
    images, digits = map(torch.from_numpy, fonts.sample(plan.pictures, plan.seed))
    torch.manual_seed(plan.seed)
    shape = config()
    shape.num_labels = 10
    model = ViTForImageClassification(shape).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay
    )
    schedule = get_linear_schedule_with_warmup(
        optimizer, round(plan.warmup * plan.steps), plan.steps
    )

    def losses() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            numbers = torch.randint(len(images), (plan.batch,))
            pixels = (images[numbers, None].float() / 127.5 - 1).expand(-1, 3, -1, -1)
            logits = model(pixels).logits
            yield {"loss": torch.nn.functional.cross_entropy(logits, digits[numbers])}

    log = loop.optimize(model, optimizer, schedule, losses(), plan, stop)
    return model.vit, [step["loss"] for step in log]


def store(backbone: ViTModel, folder: Path) -> None:
    """Write the backbone in fp16 without a head, and preprocessor_config.json."""
    backbone.config = config()
    backbone.half().save_pretrained(folder)
    processor().save_pretrained(folder)


def describe(content: dict) -> str:
    """The model card's prose around its figures."""
    plan = content["plan"]
    return f"""
A ViT of {content["parameters"]:,} parameters (16 x 16 pixels, patches of 4 x 4, 4 layers, hidden
size 96, 4 heads), without a head, made by `python -m tools.pretrain.pretrain_vit` for lessons that
must run without a GPU and without the hub.

Load it as one loads google/vit-base-patch16-224-in21k; it is stored in float16, so ask for float32.

```python
ViTForImageClassification.from_pretrained("helpers/mini/vit", num_labels=10, dtype=torch.float32)
AutoImageProcessor.from_pretrained("helpers/mini/vit")  # with or without torchvision
```

## Scores

Accuracy on 500 of scikit-learn's 1,797 real handwritten digits, fine-tuned on the other 1,297,
mean and standard deviation of three seeds; batches of {score.IMAGE["batch"]}, learning rate
{score.IMAGE["learning_rate"]}.

{card.score_table(content["scores"])}

## Making of

Supervised, {plan["steps"]} steps of {plan["batch"]} of {plan["pictures"]:,} digits drawn from the
{content["fonts"]} fonts with digits that matplotlib {content["matplotlib"]} ships (`fonts.py`), in
{content["seconds"]} s, seed {plan["seed"]}; {content["device"]}, torch {content["torch"]},
transformers {content["transformers"]}. No handwriting was seen.

{content["licence"]}
"""


def main() -> None:
    """Pretrain, score and write the mini ViT."""
    parser = card.parser(
        "Pretrain the mini ViT on digits drawn from fonts.", FOLDER, ImagePretraining.steps
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan, begin = replace(ImagePretraining(), steps=args.steps), time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    backbone, log = train(plan)
    seconds = round(time.perf_counter() - begin)
    store(backbone, args.out)
    content = {
        "plan": asdict(plan),
        "fonts": len(fonts.names()),
        "matplotlib": matplotlib.__version__,
        "seconds": seconds,
        "first_losses": log[:20],
        "last_loss": round(sum(log[-100:]) / len(log[-100:]), 4),
        **card.facts(backbone, args.out),
        "scores": score.against_random(args.out, score.digits(args.out), score.IMAGE, (60, 100)),
    }
    card.write(args.out, "Mini ViT", content, describe(content))


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m tools.pretrain.pretrain_vit"))

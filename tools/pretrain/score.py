"""Score a mini checkpoint by one short fine-tune, the same for shipped and for random weights.

The fine-tune is plain fp32 AdamW with linear warm-up, linear decay, gradient clipping at 1 and no
augmentation. It is kept apart from the course's own loop (`helpers.train`), on which pretraining
must not depend.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)  # fmt: skip

from helpers.sets import read_tab
from tools.pretrain import loop

LENGTH = 64  # tokens per example, padded to a fixed length
TEXT = {"steps": 60, "batch": 16, "learning_rate": 1e-3}
SEEDS = (0, 1, 2)
IMAGE = {"steps": 60, "batch": 32, "learning_rate": 1e-3}

Split = tuple[dict[str, Tensor], Tensor]


def r8(folder: Path) -> tuple[Split, Split]:
    """(train, test) of Reuters R8, as inputs (examples, LENGTH) int64 and labels (examples,)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = sorted(set(read_tab("reuters-r8-train")[0]))

    def encode(name: str) -> Split:
        labels, texts = read_tab(name)
        fixed = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
        inputs = tokenizer(texts, return_tensors="pt", **fixed)
        numbers = torch.tensor([names.index(label) for label in labels])
        return {name: inputs[name] for name in ("input_ids", "attention_mask")}, numbers

    return encode("reuters-r8-train"), encode("reuters-r8-test")


def digits(folder: Path) -> tuple[Split, Split]:
    """(train, test) of scikit-learn's 1,797 real digits: 1,297 and 500 examples.

    Inputs are pixel_values (examples, 3, size, size) float32, labels are (examples,) int64.
    """
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    images = [Image.fromarray((x * (255 / 16)).astype("uint8")) for x in data.images]
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    everything = {"pixel_values": pixels}, torch.tensor(data.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    return pick(everything, order[500:]), pick(everything, order[:500])


def pick(split: Split, numbers: Tensor) -> Split:
    """Some examples of a split by their numbers, in the order given."""
    inputs, labels = split
    return {name: value[numbers] for name, value in inputs.items()}, labels[numbers]


def load(folder: Path, labels: int, pretrained: bool):
    """The classifier with a new head, fp32: backbone from `folder`, or random in the same shape."""
    config = AutoConfig.from_pretrained(folder, num_labels=labels)
    image = config.model_type == "vit"
    auto = AutoModelForImageClassification if image else AutoModelForSequenceClassification
    if pretrained:
        return auto.from_pretrained(folder, num_labels=labels, dtype=torch.float32)
    return auto.from_config(config, dtype=torch.float32)


def accuracy(model, split: Split) -> float:
    """The fraction of `split` that `model` labels right, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        parts = (pick(split, numbers) for numbers in torch.arange(len(split[1])).split(256))
        right = sum(
            (model(**inputs).logits.argmax(-1) == labels).sum().item() for inputs, labels in parts
        )
    return right / len(split[1])


def tune(model, train: Split, seed: int, steps: int, batch: int, learning_rate: float) -> None:
    """Fine-tune every parameter of `model` in place for `steps` batches.

    Every epoch draws the examples anew, without replacement.
    """
    generator = np.random.default_rng(seed)
    epochs = -(-steps * batch // len(train[1]))
    order = torch.from_numpy(
        np.concatenate([generator.permutation(len(train[1])) for _ in range(epochs)])
    )
    picked = (pick(train, numbers) for numbers in order[: steps * batch].split(batch))
    losses = (
        {"loss": torch.nn.functional.cross_entropy(model(**inputs).logits, labels)}
        for inputs, labels in picked
    )
    loop.optimize(model.train(), losses, loop.Pretraining(steps, learning_rate))


def score(folder: Path, data: tuple[Split, Split], pretrained: bool, seed: int, **tuned) -> float:
    """Accuracy on the held-out examples after one fine-tune.

    `seed` decides the new head, dropout and the order of examples.
    """
    torch.manual_seed(seed)
    model = load(folder, int(data[0][1].max()) + 1, pretrained)
    tune(model, data[0], seed, **tuned)
    return accuracy(model, data[1])


def spread(values: list[float]) -> dict[str, object]:
    """{"mean", "std", "runs"}: sample standard deviation, figures rounded to four places."""
    return {
        "mean": round(statistics.mean(values), 4),
        "std": round(statistics.stdev(values), 4),
        "runs": [round(v, 4) for v in values],
    }


def against_random(score_of: Callable[..., float], steps: tuple[int, ...]) -> dict[str, dict]:
    """{"60 steps": {"shipped": spread, "random": spread}, ...}, with all else equal.

    score_of  takes `pretrained`, `seed` and `steps`
    """

    def repeat(pretrained: bool, count: int) -> dict[str, object]:
        scores = [score_of(pretrained=pretrained, seed=seed, steps=count) for seed in SEEDS]
        return spread(scores)

    return {f"{n} steps": {"shipped": repeat(True, n), "random": repeat(False, n)} for n in steps}

"""Exercises of notebook 01: pretrained weights, honest references, and fair comparisons."""

from __future__ import annotations

import json
import math
import random

import torch
from transformers import ViTConfig, ViTForImageClassification

from exercises.check import exercise
from exercises.comparisons import agree, close
from exercises.handout import observe
from helpers import models
from helpers.recipe import Recipe, difference, replace

FROM_PRETRAINED, FROM_RANDOM, BATCH = (
    60,
    480,
    16,
)  # steps, and images per step, as the exercise says


@exercise(
    "01.1",
    hints=[
        "Count images: those of the pretraining, and those that each task then saves.",
        "Pretraining plus n short runs must not cost more than n long ones; n is a whole number.",
    ],
    why="Pretraining is a price paid once: what counts is how often it is used again.",
)
def _(answer):
    card = json.loads((models.MINI / "vit" / "card.json").read_text(encoding="utf8"))
    paid = card["plan"]["steps"] * card["plan"]["batch"]
    saved = (FROM_RANDOM - FROM_PRETRAINED) * BATCH
    close(answer, math.ceil(paid / saved), rel=0, unit="tasks")


@exercise(
    "01.2",
    hints=[
        "torch.cdist(test, train) gives all distances, one row per test example.",
        "argmin over the training examples gives an index into labels, not yet a label.",
    ],
    why=(
        "A reference without any training is made in one line, "
        "and it tells what a fine-tune has really added."
    ),
)
def _(answer):
    line = torch.arange(4.0)[:, None]
    agree(
        answer,
        _nearest_label,
        [
            (line, torch.tensor([7, 5, 7, 2]), torch.tensor([[0.2], [2.9], [1.1]])),
            (line, torch.tensor([7, 5, 7, 2]), torch.tensor([[0.5], [9.0]])),
            (10 * torch.eye(3), torch.tensor([2, 0, 1]), torch.ones(1, 3) - torch.eye(3)[:1]),
        ],
        _some_points,
    )


@exercise(
    "01.3",
    hints=[
        "Check every tensor of model.base_model.state_dict() before you copy the first one.",
        (
            "load_state_dict with strict=False skips what is absent and says nothing: "
            "compare names and shapes yourself."
        ),
    ],
    why="A start that you only believe to be pretrained is the most expensive silent error of all.",
)
def _(answer):
    assert callable(answer), (
        "your answer should be a function of a model and a dictionary of tensors"
    )
    tensors = _copy(_tiny(1).base_model.state_dict())
    head = {"classifier.weight": torch.ones(5, 8), "classifier.bias": torch.ones(5)}
    before = _copy(_tiny(0).state_dict())
    after, given, raised, told = observe(_copied, answer, tensors | head)
    if raised:
        raise AssertionError(f"your answer raised {raised}: {told}")
    assert all(torch.equal(after["vit." + name], value) for name, value in tensors.items()), (
        "a tensor of the body was not copied"
    )
    head = [name for name in before if name.startswith("classifier.")]
    assert all(torch.equal(after[name], before[name]) for name in head), (
        "the head was changed, and it should stay as it was"
    )
    assert given == sorted(head), (
        f"it should return {sorted(head)}, the names that stay as they were"
    )
    absent = {
        name: value for name, value in tensors.items() if not name.endswith("position_embeddings")
    }
    shape = tensors | {"layernorm.weight": torch.ones(9)}
    for wrong, name, what in (
        (absent, "position_embeddings", "absent"),
        (shape, "layernorm.weight", "of another shape"),
        (
            {"vit." + name: value for name, value in tensors.items()},
            "",
            "absent, all names having a prefix",
        ),
    ):
        _refuses(answer, wrong, name, what)


@exercise(
    "01.4",
    hints=[
        "Give every field that may be None the value in force, then ask helpers.recipe.difference.",
        (
            "accumulation and checkpointing change how a step is computed, not what; "
            "weights is the question itself."
        ),
    ],
    why=(
        "A gain is only the technique's if nothing else changed; "
        "most published ladders fail this test."
    ),
)
def _(answer):
    text, image = Recipe("deberta"), Recipe("vit")
    scratch = replace(image, weights="random")
    examples = [
        (scratch, image),
        (scratch, replace(image, learning_rate=image.peak_learning_rate, data="digits")),
        (replace(scratch, steps=120), replace(image, seed=1)),
        (scratch, replace(image, accumulation=4, checkpointing=True)),
        (scratch, replace(image, learning_rate=3e-4, test_size=None, precision="bf16")),
        (text, replace(text, length=64)),
        (text, replace(text, length=128, train_size=100)),
        (scratch, replace(image, profile="full", data="digits")),
    ]
    agree(answer, _unfair, examples, _pair)


def _unfair(before: Recipe, after: Recipe) -> list[str]:
    settings = (
        replace(
            recipe,
            weights="random",
            data=recipe.dataset,
            length=recipe.tokens,
            learning_rate=recipe.peak_learning_rate,
            accumulation=1,
            checkpointing=False,
        )
        for recipe in (before, after)
    )
    return sorted(difference(*settings))


def _pair(rng: random.Random) -> tuple[Recipe, Recipe]:
    before = Recipe("vit", weights="random", seed=rng.randrange(3))
    choices = {
        "steps": 120,
        "learning_rate": before.peak_learning_rate,
        "accumulation": 2,
        "weight_decay": 0.1,
        "warmup": 0.0,
        "data": "digits",
        "batch_size": 32,
        "max_grad_norm": 2.0,
        "train_size": 100,
        "checkpointing": True,
    }
    return before, replace(
        before,
        weights="pretrained",
        **{name: choices[name] for name in rng.sample(sorted(choices), 4)},
    )


def _nearest_label(train: torch.Tensor, labels: torch.Tensor, test: torch.Tensor) -> torch.Tensor:
    apart = (test[:, None] - train[None]).square().sum(-1)
    return labels[apart.argmin(1)]


def _some_points(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rng.randrange(10**6))
    train, test = (torch.randn(count, 5, generator=draw) for count in (30, 12))
    return train, torch.randint(4, (30,), generator=draw), test


def _tiny(seed: int) -> ViTForImageClassification:
    torch.manual_seed(seed)
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=8,
            patch_size=4,
            num_labels=3,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():  # else norms and biases are the same in all models
            parameter.add_(torch.randn_like(parameter))
    return model


def _copy(tensors: dict) -> dict:
    return {name: value.detach().clone() for name, value in tensors.items()}


def _copied(answer, tensors: dict) -> tuple:
    """The model's tensors afterwards, what the answer gives, and what it raises: type and text."""
    model, given, raised, told = _tiny(0), None, None, ""
    try:
        given = answer(model, tensors)
    except Exception as error:
        raised = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        told = str(error)
    return _copy(model.state_dict()), given, raised, told


def _refuses(answer, tensors: dict, name: str, what: str) -> None:
    before = _tiny(0).state_dict()
    after, _, raised, told = observe(_copied, answer, tensors)
    assert raised, f"with a tensor {what} it should raise a ValueError, and raises nothing"
    assert raised == "ValueError", (
        f"with a tensor {what} it should raise a ValueError, and raises {raised}"
    )
    assert name in told, f"with {name} {what} the error should name it, and it says {told[:80]!r}"
    assert all(torch.equal(after[key], value) for key, value in before.items()), (
        f"with a tensor {what} the model was changed before the error came"
    )

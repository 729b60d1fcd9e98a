"""The same fine-tune in the training loops of other libraries gives the same weights."""

import json
from functools import lru_cache
from importlib.util import find_spec

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from by_hand import frameworks
from helpers import models, train
from helpers.parallel import launch
from helpers.recipe import Recipe, replace
from tests.attack import refused
from tests.small import ROOT, without_dropout

# 19 examples in steps of 8: the third step of an epoch has two micro-batches, the second of one
# example.
TEXT = Recipe(
    batch_size=8, accumulation=4, length=32, train_size=19, test_size=8, steps=5, padding="dynamic"
)
RECIPES = {
    "deberta": TEXT,
    "deberta-uniform": replace(TEXT, padding="uniform"),
    "vit": Recipe(model="vit", batch_size=8, accumulation=4, train_size=19, steps=5),
    "decoder": replace(TEXT, model="decoder"),
}
REAL = models.build


def still_models(replace_build=lambda build: setattr(models, "build", build)) -> None:
    """No dropout: each library draws from the generator at other moments."""
    replace_build(lambda *arguments, **keywords: without_dropout(REAL(*arguments, **keywords)))


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Relative L2 distance of all weights."""
    a, b = (
        parameters_to_vector([value.detach().float().cpu() for value in model.parameters()])
        for model in (one, other)
    )
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture
def still(monkeypatch):
    still_models(lambda build: monkeypatch.setattr(models, "build", build))


@lru_cache
def courses_own(recipe: Recipe, dropout: bool = False) -> train.TrainResult:
    """What the course's loop makes of a model, whose dropout is the caller's to set."""
    return train.fit(recipe, train.encoded(recipe)["train"], "cpu", progress=False)


@pytest.mark.parametrize(
    "name, recipe",
    [
        pytest.param(name, recipe, id=f"{name}-{recipe}")
        for name, recipes in (
            ("plain", ("deberta", "vit", "decoder")),
            ("fabric", ("deberta-uniform", "decoder")),
            ("accelerate", ("deberta-uniform", "decoder")),
            ("trainer", ("deberta-uniform", "decoder")),
        )
        for recipe in recipes
    ],
)
def test_every_loop_gives_the_weights_of_the_courses_own_bit_for_bit(name, recipe, request):
    """With dropout, which draws from one generator, seeded before the first step; Trainer seeds it
    elsewhere."""
    recipe, dropout = RECIPES[recipe], name != "trainer"
    if not dropout:
        request.getfixturevalue("still")
    reference = courses_own(recipe, dropout)
    model, losses = getattr(frameworks, name)(recipe, train.encoded(recipe)["train"])
    assert losses == pytest.approx(reference.losses, rel=1e-6)
    assert distance(model, reference.model) == 0.0


def test_a_trainer_with_its_own_loss_gives_other_weights(still):
    recipe = RECIPES["deberta-uniform"]
    model, _ = frameworks.trainer(recipe, train.encoded(recipe)["train"], corrected=False)
    assert distance(model, courses_own(recipe).model) > 1e-4


@pytest.mark.night
def test_deepspeeds_stages_give_the_plain_weights():
    """Not bit for bit: DeepSpeed clips by the norm plus 1e-6, and sums in flat buffers."""
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    stages, script = [1, 2, 3], ROOT / "tests/ranks/zero.py"
    given = json.dumps(stages), json.dumps(TEXT.to_dict())
    (text,) = launch(script, *given, ranks=1, show=False, env={"DS_ACCELERATOR": "cpu"})
    for stage, result in zip(stages, json.loads(text.split("RESULT ")[1]), strict=True):
        assert result["kind"] == "DistributedType.DEEPSPEED" and result["stage"] == stage, (
            "Accelerate dropped DeepSpeed without a word"
        )
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-4)
        assert result["distance"] < 1e-5


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"loss": "chunked", "model": "decoder"}, "loss='chunked'"),
        ({"offload": "activations"}, "offload='activations'"),
        ({"optimizer_in_backward": True, "max_grad_norm": None}, "optimizer_in_backward=True"),
        ({"compile": True}, "compile=True"),
        ({"float8": "tensorwise"}, "float8='tensorwise'"),
        ({"max_grad_norm": None}, "norm to clip to"),
    ],
    ids=str,
)
def test_ordinary_loops_refuse_what_only_the_courses_own_does(changes, says):
    frameworks.check_ordinary(Recipe())
    refused(ValueError, says, lambda: frameworks.check_ordinary(Recipe(**changes)))

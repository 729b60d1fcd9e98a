"""A recipe is complete, and a wrong one is refused in one sentence."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from helpers import data
from helpers.recipe import DATASETS, Recipe, difference
from tight_fit.checks import whole

WRONG = [
    ({"precision": "int3"}, ValueError, "fp32"),
    ({"batch_size": 0}, ValueError, "at least 1"),
    ({"batch_size": True}, TypeError, "whole number"),
    ({"batch_size": 16.0}, TypeError, "whole number"),
    ({"batch_size": 16, "accumulation": 3}, ValueError, "divide"),
    ({"accumulation": 0}, ValueError, "at least 1"),
    ({"model": "bert"}, ValueError, "deberta"),
    ({"model": None}, ValueError, "deberta"),
    ({"profile": "tiny"}, ValueError, "mini"),
    ({"model": "deberta-large"}, ValueError, "full"),
    ({"weights": "good"}, ValueError, "random"),
    ({"data": "imdb"}, ValueError, "r8"),
    ({"model": "vit", "data": "r8"}, ValueError, "digits"),
    ({"model": "decoder", "data": "cifar10"}, ValueError, "r8, newsgroups"),
    ({"model": "decoder", "length": 513}, ValueError, "512 tokens that model='decoder' takes"),
    ({"model": "decoder-1.7b"}, ValueError, "full"),
    ({"model": "vit", "length": 64}, ValueError, "text"),
    ({"length": 2}, ValueError, "at least 3"),
    ({"length": 4096}, ValueError, "512"),
    ({"steps": 0}, ValueError, "at least 1"),
    ({"seed": -1}, ValueError, "at least 0"),
    ({"train_size": 0}, ValueError, "at least 1"),
    ({"learning_rate": 0}, ValueError, "above 0"),
    ({"learning_rate": float("nan")}, ValueError, "finite"),
    ({"learning_rate": "1e-3"}, TypeError, "number"),
    ({"weight_decay": -0.1}, ValueError, "at least 0"),
    ({"warmup": 1.5}, ValueError, "fraction"),
    ({"max_grad_norm": 0}, ValueError, "above 0"),
    ({"frozen": 5}, ValueError, "4 layers"),
    ({"frozen": -1}, ValueError, "at least 0"),
    ({"checkpointing": 1}, TypeError, "True or False"),
    ({"precision": "fp8"}, ValueError, "fp16"),
    ({"optimizer": "adam"}, ValueError, "adamw8bit"),
    ({"optimizer": 8}, ValueError, "adamw8bit"),
    ({"padding": "longest"}, ValueError, "dynamic"),
    ({"model": "vit", "padding": "dynamic"}, ValueError, "text"),
    ({"lora_rank": 0}, ValueError, "at least 1"),
    ({"lora_rank": True}, TypeError, "whole number"),
    ({"lora_rank": 129}, ValueError, "128 columns"),
    ({"lora_rank": 8, "frozen": 4}, ValueError, "nothing to adapt"),
]


@pytest.mark.parametrize("changes, kind, says", WRONG, ids=[str(case[0]) for case in WRONG])
def test_wrong_recipes_are_refused_in_one_sentence(changes, kind, says):
    with pytest.raises(kind) as caught:
        Recipe(**changes)
    message = str(caught.value)
    assert says in message and "\n" not in message and message.endswith((".", "?"))
    assert next(iter(changes)) in message or len(changes) > 1


def test_there_and_back():
    recipe = Recipe(model="vit", train_size=100, accumulation=4, precision="bf16", seed=3)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(ValueError, match="no field colour"):
        Recipe.from_dict({"colour": "red"})


def test_difference_names_the_fields():
    before = Recipe()
    assert difference(before, replace(before, accumulation=4)) == {"accumulation": (1, 4)}
    assert difference(before, before) == {}


def test_what_a_recipe_leaves_out_follows_model_and_profile():
    assert Recipe().dataset == "r8" and Recipe(profile="full").dataset == "newsgroups"
    assert (
        Recipe().tokens == 64
        and Recipe(profile="full").tokens == 256
        and Recipe(model="vit").tokens is None
    )
    assert Recipe(batch_size=16, accumulation=4).micro_batch == 4
    assert Recipe(learning_rate=0.5).peak_learning_rate == 0.5


def test_the_docstring_names_every_field():
    for field in fields(Recipe):
        assert field.name in Recipe.__doc__


@pytest.mark.parametrize("name", ["r8", "newsgroups", "digits"])
def test_the_number_of_classes_is_that_of_the_data(name):
    assert data.load(name)["train"].features["label"].num_classes == DATASETS[name].classes


def test_scalars_of_numpy_and_torch_become_pythons_own():
    steps, warmup = np.int64(3), torch.tensor(0.5)
    recipe = Recipe(steps=steps, warmup=warmup, checkpointing=np.bool_(True))
    assert recipe == Recipe(steps=3, warmup=0.5, checkpointing=True)
    assert [type(value) for value in (recipe.steps, recipe.warmup, recipe.checkpointing)] == [
        int,
        float,
        bool,
    ]
    with pytest.raises(TypeError, match="whole number"):
        Recipe(steps=np.array([3, 4]))
    assert whole("rows", np.int32(4), 1) == 4 and type(whole("rows", torch.tensor(4), 1)) is int

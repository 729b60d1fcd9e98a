"""A recipe is complete; tests/attack/test_recipes.py has the wrong ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import data
from helpers.recipe import DATASETS, Recipe, difference
from tight_fit.checks import whole


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

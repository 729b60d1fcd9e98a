"""A recipe is complete; tests/attack/test_recipes.py has the wrong ones."""

from dataclasses import replace

import pytest

from helpers import data
from helpers.recipe import DATASETS, Recipe, difference


def test_difference_names_the_fields():
    before = Recipe()
    assert difference(before, replace(before, accumulation=4)) == {"accumulation": (1, 4)}
    assert difference(before, before) == {}


def test_what_a_recipe_leaves_out_follows_model_and_profile():
    assert Recipe().dataset == "r8" and Recipe(profile="full").dataset == "newsgroups"
    assert Recipe().tokens == 64
    assert Recipe(profile="full").tokens == 256
    assert Recipe(model="vit").tokens is None
    assert Recipe(batch_size=16, accumulation=4).micro_batch == 4
    assert Recipe(learning_rate=0.5).peak_learning_rate == 0.5


@pytest.mark.parametrize("name", ["r8", "newsgroups", "digits"])
def test_the_number_of_classes_is_that_of_the_data(name):
    assert data.load(name)["train"].features["label"].num_classes == DATASETS[name].classes

"""A recipe is complete; tests/attack/test_recipes.py has the wrong ones."""

from dataclasses import replace

from helpers import data
from helpers.recipe import DATASETS, Recipe, difference


def test_what_a_recipe_leaves_out_follows_model_and_profile():
    assert (Recipe().dataset, Recipe().tokens) == ("r8", 64)
    full = Recipe(profile="full")
    assert (full.dataset, full.tokens) == ("newsgroups", 256)
    assert Recipe(model="vit").tokens is None
    assert Recipe(batch_size=16, accumulation=4).micro_batch == 4
    assert difference(full, replace(full, accumulation=4)) == {"accumulation": (1, 4)}
    for name in ("r8", "digits"):
        classes = data.load(name)["train"].features["label"].num_classes
        assert classes == DATASETS[name].classes

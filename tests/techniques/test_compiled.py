"""A compiled model learns the same, and is measured and evaluated operation by operation."""

import pytest
import torch

from helpers import measure, models, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.techniques import compiled

RECIPE = Recipe(model="vit", batch_size=4, train_size=16, test_size=8, steps=3, learning_rate=1e-3)


def test_a_compiled_fine_tune_has_the_losses_of_the_one_without():
    """Dropout draws other numbers when compiled, so it is off here (the ViT has none)."""
    plain, fast = (train.fit(replace(RECIPE, compile=on), progress=False) for on in (False, True))
    assert fast.model._compiled_call_impl is not None
    assert fast.losses == pytest.approx(plain.losses, rel=1e-4)
    split = train.encoded(RECIPE)["test"]
    assert train.evaluate(fast.model, split, RECIPE) == train.evaluate(plain.model, split, RECIPE)


def test_the_plan_is_that_of_the_step_without_and_so_is_what_is_tracked():
    on = replace(RECIPE, compile=True)
    assert plan(on, "cpu").peak == plan(RECIPE, "cpu").peak
    model = models.build(on)
    batch = train.encoded(RECIPE)["train"].batch(range(4))
    with compiled.not_compiled(model), torch.no_grad():
        logits = model(pixel_values=batch["pixel_values"]).logits
    plain = models.build(RECIPE)(pixel_values=batch["pixel_values"]).logits
    assert torch.equal(logits, plain)


def test_without_a_compiler_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"neither g\+\+ nor clang\+\+"):
        models.build(replace(RECIPE, compile=True))


def test_a_compiled_recipe_is_measured_as_it_is_planned():
    recipe = Recipe(model="vit", batch_size=4, compile=True)
    real = measure.measure(recipe, train.encoded(recipe)["train"]).tracked
    assert real.peak == plan(recipe, "cpu").peak

"""A compiled model learns the same, and is measured and evaluated operation by operation."""

import pytest
import torch

from helpers import measure, models, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.small import python
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


@pytest.mark.night
def test_a_compiled_recipe_is_measured_as_it_is_planned():
    recipe = Recipe(model="vit", batch_size=4, compile=True)
    real = measure.measure(recipe, train.encoded(recipe)["train"]).tracked
    assert real.peak == plan(recipe, "cpu").peak


def test_a_function_is_compiled_when_it_is_called(monkeypatch):
    """With the options it was given, once, and by PyTorch's own torch.compile."""
    asked = []

    def compile_now(function, **options):
        asked.append((function, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_now)

    def double(x):
        return 2 * x

    with compiled.compiling_when_called():
        plain = torch.compile(double, dynamic=True)
        decorated = torch.compile(fullgraph=True)(double)
    assert torch.compile is compile_now and not asked
    assert [plain(3), plain(4), decorated(5)] == [6, 8, 10]
    assert asked == [(double, {"dynamic": True}), (double, {"fullgraph": True})]
    assert plain.__name__ == "double"


def test_planning_an_adapter_imports_no_compiler():
    source = (
        "import sys\nfrom tight_fit import plan_model\n"
        "plan_model('distilgpt2', batch_size=1, length=8, lora_rank=2)\n"
        "assert 'bitsandbytes' in sys.modules and 'torch._inductor.compile_fx' not in sys.modules"
    )
    python("-c", source, check=True)

"""Plans against a T4 and an A10, measured and published by others, and plans of custom steps."""

import pytest
import torch

from benchmarks import published_peaks
from helpers import models
from helpers.plan import fake_batch, plan
from helpers.recipe import Recipe, replace
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step
from tight_fit.torch_private import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues

MINI = {"deberta": Recipe(batch_size=8, length=32), "vit": Recipe(model="vit", batch_size=8)}


@pytest.fixture(scope="module")
def done():
    return [(step, *published_peaks.allocator_peaks(step)) for step in published_peaks.STEPS]


@pytest.mark.parametrize("step", published_peaks.STEPS, ids=lambda step: step.name)
def test_the_models_are_those_that_were_measured(step):
    with FakeTensorMode(allow_non_fake_inputs=True), FakeValues():
        model = step.setup()[0][0]
        assert sum(parameter.numel() for parameter in model.parameters()) == step.parameters


def test_the_allocated_peak_of_a_real_gpu(done):
    misses = {
        step.name: blocks.allocated / step.allocated - 1
        for step, _, blocks in done
        if step.allocated
    }
    assert (
        max(map(abs, misses.values())) < 0.005
        and sum(map(abs, misses.values())) / len(misses) < 0.002
    ), misses
    tensors = {
        step.name: planned.peak / step.allocated - 1 for step, planned, _ in done if step.allocated
    }
    assert all(-0.04 < miss < 0 for miss in tensors.values()), (
        f"without workspace and blocks it is short: {tensors}"
    )


def test_the_reserved_peak_of_a_real_gpu(done):
    misses = {step.name: blocks.reserved / step.reserved - 1 for step, _, blocks in done}
    assert (
        max(map(abs, misses.values())) < 0.03
        and sum(map(abs, misses.values())) / len(misses) < 0.012
    ), misses


def test_the_table_says_it(done):
    frame = published_peaks.table(done).frame.set_index("step")
    assert len(frame) == len(published_peaks.STEPS)
    for name in ("BERT-base, 4 × 128", "DeBERTa-v3-base, 2 × 16", "ViT-B/16, 2 images"):
        assert frame.loc[name, "reserved, planned"].endswith("(+0.00%)")
    assert frame.loc["ViT-B/16, 2 images", "allocated"] == "not seen"


@pytest.mark.parametrize(
    "recipe",
    [MINI["vit"], replace(MINI["deberta"], accumulation=2)],
    ids=lambda recipe: recipe.model,
)
def test_the_courses_step_planned_as_ones_own(recipe):
    def setup():
        model = models.empty(recipe)
        optimizer = make_optimizer(model, recipe)

        def batches():
            for _ in range(recipe.accumulation):
                yield fake_batch(model, recipe)

        return [model], lambda: train_step(model, optimizer, batches(), recipe.batch_size, recipe)

    own, made = plan_custom_step(setup), plan(recipe)
    assert own.peak == pytest.approx(made.peak, rel=0.01)  # which counts blocks of 512 bytes
    assert own.allocator_peaks("T4").allocated == pytest.approx(
        made.allocator_peaks("T4").allocated, rel=0.01
    )


def own_step(keep: bool):
    def setup():
        model = torch.nn.Linear(1000, 1000)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)
        batch = torch.zeros(3000, 1000)

        def step():
            optimizer.zero_grad(set_to_none=not keep)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()

        return [model, batch], step

    return setup


def test_gradients_that_are_kept_are_seen():
    """1,001,000 gradients of four bytes lie beside everything else, from the second step on."""
    assert (
        plan_custom_step(own_step(keep=True)).peak - plan_custom_step(own_step(keep=False)).peak
        == 4 * 1_001_000
    )
    assert (
        plan_custom_step(own_step(keep=True), steps=1).peak
        == plan_custom_step(own_step(keep=False), steps=1).peak
    )


def test_an_initializer_that_draws_until_all_is_within_bounds_ends():
    def setup():
        model = torch.nn.Linear(10, 10)
        torch.nn.init.trunc_normal_(model.weight)
        return [model], lambda: model(torch.zeros(5, 10)).sum().backward()

    assert plan_custom_step(setup).peak > 2 * 4 * 110

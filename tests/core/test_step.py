"""Accumulated gradients equal the full batch's, whatever the lengths and the last group."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector

from helpers import models, train
from helpers.recipe import Recipe, replace
from tests.small import without_dropout
from tight_fit.techniques.step import learning_rate, tensor_cores, train_step

TOLERANCE = 1e-5  # relative L2 distance, fp32, sums in another order


class Keep(torch.optim.SGD):
    """An optimizer that only remembers the gradients it was given."""

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        assert all(parameter.grad is not None for parameter in parameters), (
            "a parameter got no gradient"
        )
        self.gradients = parameters_to_vector([parameter.grad for parameter in parameters])


def still(recipe):
    return without_dropout(models.build(recipe))


def gradients(model, batch, sizes, recipe):
    """Gradients of one group whose micro-batches have the given sizes, and its loss."""
    parts, start = [], 0
    for size in sizes:
        parts.append({name: value[start : start + size] for name, value in batch.items()})
        start += size
    keep = Keep(model.parameters(), lr=1.0)
    loss = train_step(model, keep, parts, start, replace(recipe, max_grad_norm=1e9))
    return keep.gradients, loss


@pytest.fixture(scope="module", params=["deberta", "vit"])
def group(request):
    recipe = Recipe(model=request.param, length=24 if request.param == "deberta" else None)
    data = train.encoded(recipe)["train"]
    rows = (
        data.lengths.argsort()[torch.linspace(0, len(data) - 1, 12).long()]
        if recipe.task == "text"
        else range(12)
    )
    model = still(recipe)
    batch = data.batch(rows)
    reference = torch.nn.functional.cross_entropy(
        model(**{name: value for name, value in batch.items() if name != "labels"}).logits,
        batch["labels"],
    )
    reference.backward()
    vector = parameters_to_vector([parameter.grad for parameter in model.parameters()]).clone()
    model.zero_grad()
    return recipe, model, batch, vector, reference.detach()


@pytest.mark.parametrize("sizes", [[12], [6, 6], [4, 4, 4], [5, 5, 2], [8, 3, 1], [1] * 12])
def test_gradients_and_loss_are_the_full_batchs(group, sizes):
    recipe, model, batch, reference, loss = group
    gradient, mean = gradients(model, batch, sizes, recipe)
    assert (gradient - reference).norm() / reference.norm() < TOLERANCE
    assert mean.item() == pytest.approx(loss.item(), rel=1e-5)


def test_checkpointing_replays_dropout():
    recipe = Recipe(length=24, batch_size=8, steps=3)
    data = train.encoded(recipe)["train"]
    plain = train.fit(recipe, data, "cpu", progress=False).losses
    assert (
        train.fit(replace(recipe, checkpointing=True), data, "cpu", progress=False).losses == plain
    )


@settings(max_examples=60, deadline=None)
@given(steps=st.integers(1, 300), warmup=st.floats(0, 1))
def test_the_rate_rises_to_its_peak_and_falls_to_almost_nothing(steps, warmup):
    recipe = Recipe(steps=steps, warmup=warmup, learning_rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(steps)]
    warm = round(warmup * steps)
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) == 1.0
    assert rates[:warm] == sorted(rates[:warm])
    assert rates[warm:] == sorted(rates[warm:], reverse=True)
    if warm < steps:
        assert math.isclose(rates[-1], 1 / (steps - warm))


def test_tensor_cores_are_on_exactly_when_asked_and_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with tensor_cores(Recipe(precision="tf32")):
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    with tensor_cores(Recipe()):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before

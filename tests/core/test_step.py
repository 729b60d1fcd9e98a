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
        missing = [parameter.shape for parameter in parameters if parameter.grad is None]
        assert not missing, f"a parameter got no gradient: {missing}"
        self.gradients = parameters_to_vector([parameter.grad for parameter in parameters])


@pytest.fixture(scope="module", params=["deberta", "vit"])
def group(request):
    """A recipe, its model, twelve examples (short and long ones), their gradients and loss."""
    recipe = Recipe(model=request.param, length=24 if request.param == "deberta" else None)
    data = train.encoded(recipe)["train"]
    rows = data.lengths.argsort()[torch.linspace(0, len(data) - 1, 12).long()]
    model, batch = without_dropout(models.build(recipe)), data.batch(rows)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    loss = torch.nn.functional.cross_entropy(model(**inputs).logits, batch["labels"])
    loss.backward()
    vector = parameters_to_vector([parameter.grad for parameter in model.parameters()]).clone()
    model.zero_grad()
    return recipe, model, batch, vector, loss.item()


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [8, 3, 1], [1] * 12], ids=str)
def test_gradients_and_loss_are_the_full_batchs(group, sizes):
    recipe, model, batch, reference, loss = group
    cut = {name: value.split(sizes) for name, value in batch.items()}
    parts = [{name: cut[name][part] for name in cut} for part in range(len(sizes))]
    keep = Keep(model.parameters(), lr=1.0)
    mean = train_step(model, keep, parts, 12, replace(recipe, max_grad_norm=1e9))
    assert (keep.gradients - reference).norm() / reference.norm() < TOLERANCE
    assert mean.item() == pytest.approx(loss, rel=1e-5)


def test_checkpointing_replays_dropout():
    recipe = Recipe(length=24, batch_size=8, steps=3)
    data = train.encoded(recipe)["train"]
    plain, again = (
        train.fit(replace(recipe, checkpointing=on), data, "cpu", progress=False).losses
        for on in (False, True)
    )
    assert plain == again


@settings(max_examples=60, deadline=None)
@given(steps=st.integers(1, 300), warmup=st.floats(0, 1))
def test_the_rate_rises_to_its_peak_and_falls_to_almost_nothing(steps, warmup):
    recipe = Recipe(steps=steps, warmup=warmup, learning_rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(steps)]
    warm = round(warmup * steps)
    assert max(rates) == 1.0 and min(rates) > 0
    assert rates[:warm] == sorted(rates[:warm])
    assert rates[warm:] == sorted(rates[warm:], reverse=True)
    if warm < steps:
        assert math.isclose(rates[-1], 1 / (steps - warm))


def test_tensor_cores_are_on_exactly_when_asked_and_put_back():
    def now():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = now()
    for precision, expected in (("tf32", ("high", True)), ("fp32", ("highest", False))):
        with tensor_cores(Recipe(precision=precision)):
            assert now() == expected
    assert now() == before

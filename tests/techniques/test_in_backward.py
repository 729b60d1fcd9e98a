"""The optimizer in the backward pass gives the weights of the ordinary step."""

import pytest
import torch

from helpers import models, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step

VIT = Recipe(model="vit", batch_size=8, max_grad_norm=None)


def trained(recipe: Recipe, steps: int = 3) -> dict[str, torch.Tensor]:
    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    batch = train.encoded(recipe)["train"].batch(range(recipe.batch_size))
    for _ in range(steps):
        train_step(model, optimizer, [batch], recipe.batch_size, recipe)
    assert all(parameter.grad is None for parameter in model.parameters())
    return model.state_dict()


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "adamw8bit"])
def test_the_weights_are_those_of_the_ordinary_step_bit_for_bit(optimizer):
    recipe = replace(VIT, optimizer=optimizer)
    early = trained(replace(recipe, optimizer_in_backward=True))
    late = trained(recipe)
    assert early.keys() == late.keys()
    assert all(torch.equal(early[name], late[name]) for name in late)


def test_gradients_never_exist_together():
    early = plan(replace(VIT, optimizer_in_backward=True), "cpu").highest["gradients"]
    late = plan(VIT, "cpu").highest["gradients"]
    largest = max(parameter.nbytes for parameter in models.build(VIT).parameters())
    assert early <= 2 * largest < late / 4


def test_the_hooks_are_gone_after_the_step():
    recipe = replace(VIT, optimizer_in_backward=True)
    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    batch = train.encoded(recipe)["train"].batch(range(8))
    train_step(model, optimizer, [batch], 8, recipe)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), [batch], 8, VIT)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_several_passes_through_one_parameter_update_it_once():
    """Its gradient is the sum, as where embeddings and output layer share their weight."""
    from tight_fit.techniques.in_backward import updated_in_backward

    shared = torch.nn.Linear(2, 2, bias=False)
    before = shared.weight.detach().clone()
    x = torch.tensor([[1.0, 2.0]])
    with updated_in_backward(shared, torch.optim.SGD(shared.parameters(), lr=1.0)):
        shared(shared(x)).sum().backward()
    weight = before.clone().requires_grad_(True)
    (x @ weight.T @ weight.T).sum().backward()
    torch.testing.assert_close(shared.weight, before - weight.grad)

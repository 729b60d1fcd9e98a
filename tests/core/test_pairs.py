"""Every field of the recipe with every other.

The gradients that should agree with the plain run's do, what should train trains, and nothing else
moves.
"""

from functools import lru_cache

import pytest
import torch

from helpers import models, train
from helpers.recipe import Recipe, replace
from tests.combinations import ALL, VALUES, covering, name, recipe
from tests.small import without_dropout
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import train_step

# fp32 sums in another order; half precision rounds to 2^-8 (bf16) or 2^-11 (fp16) at every product
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 0.15, "fp16": 0.02}


class Keep(torch.optim.SGD):
    """An optimizer that changes nothing and remembers the gradients it was given."""

    def step(self, closure=None):
        self.gradients = {
            id(parameter): parameter.grad.clone() for parameter in self.param_groups[0]["params"]
        }


def still(recipe: Recipe):
    return without_dropout(models.build(recipe))


def gradients(recipe: Recipe) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients by name of the first step, before clipping, and its loss."""
    model = still(recipe)
    keep = Keep([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1.0)
    batch = train.encoded(recipe)["train"].batch
    parts = [
        batch(range(start, start + recipe.micro_batch))
        for start in range(0, recipe.batch_size, recipe.micro_batch)
    ]
    loss = train_step(
        model,
        keep,
        parts,
        recipe.batch_size,
        replace(recipe, max_grad_norm=1e9),
        scaler=torch.amp.GradScaler("cpu", init_scale=256.0, enabled=recipe.precision == "fp16"),
    )
    return {
        key: keep.gradients[id(value)]
        for key, value in model.named_parameters()
        if value.requires_grad
    }, loss.item()


@lru_cache
def plain(model: str):
    return gradients(recipe({key: values[0] for key, values in VALUES.items()} | {"model": model}))


def test_every_two_values_meet():
    met = {
        frozenset({(a, fields[a]), (b, fields[b])})
        for fields in covering()
        for a in fields
        for b in fields
        if a != b
    }
    assert met == {
        frozenset({(a, x), (b, y)})
        for a in VALUES
        for b in VALUES
        if a != b
        for x in VALUES[a]
        for y in VALUES[b]
    }


@pytest.mark.parametrize("fields", ALL, ids=name)
def test_the_first_gradient_is_the_plain_runs(fields):
    """Adapters start as nothing, so loss and the head's gradient agree with LoRA, too."""
    actual, loss = gradients(recipe(fields))
    reference, expected = plain(fields["model"])
    tolerance = TOLERANCE[fields["precision"]]
    assert loss == pytest.approx(expected, rel=tolerance)
    shared = [key for key in actual if key in reference]
    head = any(key.startswith("classifier") for key in shared)
    assert head == (fields["model"] != "decoder") or fields["lora_rank"] is None
    assert fields["lora_rank"] or set(actual) == set(shared)
    if fields["frozen"] is None and fields["lora_rank"] is None:
        assert set(actual) == set(reference)
    if shared:  # a decoder's adapters are all that trains, as its head came with the checkpoint
        one, other = (
            torch.cat([values[key].flatten() for key in shared]) for values in (actual, reference)
        )
        assert (one - other).norm() / other.norm() < tolerance
    new = {key: value for key, value in actual.items() if key not in reference}
    assert all("lora_" in key for key in new) and all(
        value.any() for key, value in new.items() if "lora_B" in key
    )


@pytest.mark.parametrize("fields", ALL, ids=name)
def test_three_steps_move_what_should_train_and_nothing_else(fields):
    trained = recipe(fields, weight_decay=0.0, learning_rate=1e-3, warmup=0.0, steps=3)
    net = still(trained)
    before = {key: value.clone() for key, value in net.named_parameters()}
    frozen = models.frozen_names(net, trained)
    optimizer, scaler = make_optimizer(net, trained), make_scaler(trained, "cpu")
    data, losses = train.encoded(trained)["train"], []
    batch = [
        data.batch(range(start, start + trained.micro_batch))
        for start in range(0, 8, trained.micro_batch)
    ]
    scale = scaler.get_scale()
    while len(losses) < 3:  # the same batch three times: the loss must fall
        loss = train_step(net, optimizer, batch, 8, trained, scaler=scaler)
        if scaler.get_scale() == scale:
            losses.append(loss.item())
        scale = scaler.get_scale()
    assert losses[2] < losses[0]
    moved = {key for key, value in net.named_parameters() if not torch.equal(value, before[key])}
    assert not moved & frozen
    # A key's bias shifts every score of a row alike, which softmax undoes: its gradient is
    # rounding, or nothing.
    assert {
        key for key in set(before) - frozen - moved if "key" not in key and "k_proj" not in key
    } == set()
    assert {id(parameter) for parameter in optimizer.state} == {
        id(parameter) for key, parameter in net.named_parameters() if key not in frozen
    }

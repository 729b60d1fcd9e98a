"""Every field of the recipe with every other, in one run each.

The plan is what real tensors take, the gradients that should agree with the plain run's do, what
should train trains, and nothing else moves.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch

from helpers import measure, models, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.combinations import ALL, drawn, name, pairs, recipe
from tests.night import few_by_day
from tests.small import without_dropout
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import train_step

# fp32 sums in another order; half precision rounds to 2^-8 (bf16) or 2^-11 (fp16) at every product
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5, "bf16": 0.15, "fp16": 0.02}
BY_DAY = 24  # the first recipes of the list, which hold nine tenths of all pairs


class Keep(torch.optim.SGD):
    """An optimizer that changes nothing and remembers the gradients it was given."""

    def step(self, closure=None):
        self.gradients = {id(p): p.grad.clone() for p in self.param_groups[0]["params"]}


def batches(recipe: Recipe) -> list:
    batch = train.encoded(recipe)["train"].batch
    starts = range(0, recipe.batch_size, recipe.micro_batch)
    return [batch(range(start, start + recipe.micro_batch)) for start in starts]


def gradients(recipe: Recipe) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients by name of the first step, before clipping, and its loss."""
    model = without_dropout(models.build(recipe))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    keep = Keep(list(trained.values()), lr=1.0)
    unclipped = replace(recipe, max_grad_norm=1e9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=recipe.precision == "fp16")
    loss = train_step(model, keep, batches(recipe), recipe.batch_size, unclipped, scaler=scaler)
    return {name: keep.gradients[id(p)] for name, p in trained.items()}, loss.item()


@lru_cache
def plain(model: str):
    return gradients(recipe({"model": model}))


def test_no_pair_is_missing():
    met = set().union(*map(pairs, ALL))
    assert len(set().union(*map(pairs, ALL[:BY_DAY]))) >= 0.9 * len(met)
    for changes in drawn(500, seed=1):
        assert pairs(changes) <= met


@pytest.mark.parametrize("changes", few_by_day(ALL, ALL[:BY_DAY].__contains__), ids=name)
def test_a_recipe_is_planned_measured_and_trained(changes):
    """To the byte: the whole timeline, event by event, the FLOPs, and bytes in the host's memory.

    The rest is of the same fields on fp32 weights, with products in as many bits, and with an
    update after the backward pass: its gradients are there to be compared.
    """
    asked = recipe(changes)
    planned = plan(asked, "cpu")
    real = measure.measure(asked, train.encoded(asked)["train"]).tracked
    assert planned.peak == real.peak and planned.at_peak == real.at_peak
    assert planned.host == real.host and (asked.offload is not None or planned.host == 0)
    assert np.array_equal(planned.timeline, real.timeline) and planned.flops == real.flops
    other = ("base", "optimizer_in_backward", "offload", "float8")
    fields = {key: value for key, value in changes.items() if key not in other}
    if asked.optimizer != "adamw_stochastic":  # for bf16 weights
        the_first_gradient_is_the_plain_runs(fields)
        three_steps_move_what_should_train_and_nothing_else(fields)


def the_first_gradient_is_the_plain_runs(fields: dict) -> None:
    """Adapters start as nothing, so loss and the head's gradient agree with LoRA, too."""
    asked = recipe(fields)
    actual, loss = gradients(asked)
    reference, expected = plain(asked.model)
    tolerance = TOLERANCE[asked.precision]
    assert loss == pytest.approx(expected, rel=tolerance)
    shared = [key for key in actual if key in reference]
    head = any(key.startswith("classifier") for key in shared)
    assert head == (asked.model != "decoder") or asked.lora_rank is None
    assert asked.lora_rank or set(actual) == set(shared)
    if asked.frozen is None and asked.lora_rank is None:
        assert set(actual) == set(reference)
    if shared:  # a decoder's adapters are all that trains, as its head came with the checkpoint
        one, other = (
            torch.cat([values[key].flatten() for key in shared]) for values in (actual, reference)
        )
        assert (one - other).norm() / other.norm() < tolerance
    new = {key: value for key, value in actual.items() if key not in reference}
    assert all("lora_" in key for key in new)
    assert all(value.any() for key, value in new.items() if "lora_B" in key)


def three_steps_move_what_should_train_and_nothing_else(fields: dict) -> None:
    trained = recipe(fields, weight_decay=0.0, learning_rate=1e-3, warmup=0.0, steps=3)
    net = without_dropout(models.build(trained))
    before = {key: value.clone() for key, value in net.named_parameters()}
    frozen = models.frozen_names(net, trained)
    optimizer, scaler = make_optimizer(net, trained), make_scaler(trained, "cpu")
    batch, losses, scale = batches(trained), [], scaler.get_scale()
    while len(losses) < 3:  # the same batch three times: the loss must fall
        loss = train_step(net, optimizer, batch, trained.batch_size, trained, scaler=scaler)
        if scaler.get_scale() == scale:
            losses.append(loss.item())
        scale = scaler.get_scale()
    assert losses[2] < losses[0]
    moved = {key for key, value in net.named_parameters() if not torch.equal(value, before[key])}
    assert not moved & frozen
    # A key's bias shifts every score of a row alike, which softmax undoes: its gradient is
    # rounding, or nothing. Half of an adapter has none until the other half has moved, and what SGD
    # adds to it then may be lost in rounding.
    little = ("key", "k_proj", *(["lora_A"] if trained.optimizer == "sgd" else []))
    unmoved = set(before) - frozen - moved
    assert {key for key in unmoved if not any(part in key for part in little)} == set()
    should = {id(value) for key, value in net.named_parameters() if key not in frozen}
    assert {id(parameter) for parameter in optimizer.state} == should

"""fp16's loss scale: undone once per group, before the norm; overflowing steps change nothing."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from helpers import models, train
from helpers.recipe import Recipe, replace
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import learning_rate, train_step

FP16 = Recipe(model="vit", precision="fp16", batch_size=8)


def scaler(start: float, recipe: Recipe = FP16) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=start, enabled=recipe.precision == "fp16")


def batches(recipe: Recipe) -> list:
    batch, size = train.encoded(recipe)["train"].batch, recipe.micro_batch
    return [batch(range(start, start + size)) for start in range(0, recipe.batch_size, size)]


def weights(net) -> torch.Tensor:
    return parameters_to_vector(net.parameters()).detach().clone()


def moved(recipe: Recipe, scale: float = 256.0) -> torch.Tensor:
    """How far a step moves the weights."""
    net = models.build(recipe)
    before = weights(net)
    torch.manual_seed(0)
    optimizer, scaled = make_optimizer(net, recipe), scaler(scale, recipe)
    train_step(net, optimizer, batches(recipe), recipe.batch_size, recipe, scaler=scaled)
    return weights(net) - before


def test_the_scale_is_2_to_the_16_only_in_fp16_and_not_left_out_there():
    assert make_scaler(FP16, "cpu").get_scale() == 2.0**16
    assert not make_scaler(replace(FP16, precision="bf16"), "cpu").is_enabled()
    with pytest.raises(ValueError, match="make_scaler"):
        train_step(None, None, [], 1, FP16)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw8bit"])
def test_the_scale_does_not_reach_the_weights(optimizer):
    """The clipped step is the same whatever the scale, and nearly fp32's.

    The scales are powers of two with which nothing overflows or vanishes. SGD's step is
    proportional to the clipped gradient: had the norm been taken of scaled gradients, or the scale
    not been undone, it would differ by powers of two.
    """
    fields = {"optimizer": optimizer, "weight_decay": 0.0, "max_grad_norm": 0.01}
    recipe = replace(FP16, learning_rate=0.5 if optimizer == "sgd" else 1e-3, **fields)
    small, large = (moved(recipe, scale) for scale in (2.0**4, 2.0**12))
    assert (small - large).norm() < 0.05 * large.norm()
    if optimizer == "sgd":
        plain = moved(replace(recipe, precision="fp32"))
        assert large.norm().item() == pytest.approx(0.01 * 0.5, rel=1e-3)
        assert plain.norm().item() == pytest.approx(0.01 * 0.5, rel=1e-3)
        assert (large - plain).norm() < 0.05 * plain.norm()


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale():
    net, high = models.build(FP16), scaler(2.0**120)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    loss = train_step(net, make_optimizer(net, FP16), batches(FP16), 8, FP16, scaler=high)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert high.get_scale() == 2.0**119 and torch.isfinite(loss)
    left = [parameter for parameter in net.parameters() if parameter.grad is not None]
    assert not left, "what overflowed does not stay behind"


def test_one_bad_micro_batch_skips_the_whole_group():
    recipe = replace(FP16, accumulation=4)
    net, parts = models.build(recipe), batches(recipe)
    parts[1]["pixel_values"] = parts[1]["pixel_values"] * torch.inf
    before = weights(net)
    train_step(net, make_optimizer(net, recipe), parts, 8, recipe, scaler=scaler(256.0))
    assert torch.equal(weights(net), before)


def test_skipped_steps_are_counted_and_do_not_use_up_the_schedule(monkeypatch):
    recipe = replace(FP16, steps=8, warmup=0.5, train_size=40)
    monkeypatch.setattr(train, "make_scaler", lambda recipe, device: scaler(2.0**19))
    rates, real = [], train.train_step

    def step(model, optimizer, *rest, **keywords):
        rates.append(optimizer.param_groups[0]["lr"])
        return real(model, optimizer, *rest, **keywords)

    monkeypatch.setattr(train, "train_step", step)
    done = train.fit(recipe, device="cpu", progress=False)
    skipped = len(done.skipped)
    assert 0 < skipped < 8, "too high a scale at first, then not any more"
    assert done.skipped == list(range(skipped)) and len(done.losses) == 8
    assert rates[: skipped + 1] == [learning_rate(recipe, 0)] * (skipped + 1)
    assert rates[skipped:] == [learning_rate(recipe, step) for step in range(8 - skipped)]
    plain = replace(recipe, precision="fp32", steps=2)
    assert train.fit(plain, device="cpu", progress=False).skipped == []


def test_momenta_of_sgd_begin_at_zero_where_the_first_step_overflows():
    """PyTorch's fused SGD makes them without values, and a skipped step fills them with none."""
    net = models.build(FP16)
    optimizer, first = make_optimizer(net, replace(FP16, optimizer="sgd")), scaler(4.0)
    first.scale(torch.ones(()))
    for gradient, momentum in ((torch.inf, 0.0), (2.0, 1.0)):  # then of a loss that is scaled by 2
        for value in net.parameters():
            value.grad = torch.full_like(value, gradient)
        first.step(optimizer)
        first.update()
        held = [optimizer.state[value]["momentum_buffer"] for value in net.parameters()]
        # Weight decay is part of the gradient.
        assert max((one - momentum).abs().max() for one in held) <= 0.1 * momentum

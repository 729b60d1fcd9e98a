"""Stochastic rounding is right in the mean, and AdamW with it learns what plain bf16 loses."""

import pytest
import torch

from tight_fit.techniques import stochastic_rounding
from tight_fit.techniques.stochastic_rounding import StochasticAdamW, rounded


@pytest.mark.parametrize("value", [1.001, -1.001, 3.1415927, 1e-30, -7e20, 0.0, 1.0])
def test_a_value_becomes_one_of_its_two_neighbours_and_in_the_mean_itself(value):
    torch.manual_seed(0)
    many = rounded(torch.full((200_000,), value)).float()
    exact = torch.tensor(value)
    below = exact.view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)
    above = (below.view(torch.int32) + 2**16).view(torch.float32)
    assert set(many.unique().tolist()) <= {below.item(), above.item()}
    spread = (above - below).abs().item()
    assert many.double().mean().item() == pytest.approx(exact.item(), abs=5e-3 * spread)


def test_what_is_not_finite_stays():
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -float("nan")])
    for _ in range(50):
        out = rounded(special)
        assert out[:2].tolist() == special[:2].tolist() and out[2:].isnan().all()


def steps(optimizer, parameter, count: int = 400) -> float:
    for _ in range(count):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter.float().mean().item()


def test_small_updates_add_up_where_rounding_to_the_nearest_loses_them():
    """400 steps of 1e-4 take 1 to 0.96; rounded to the nearest, 1 stays 1."""
    torch.manual_seed(0)
    nearest = torch.ones(20_000, dtype=torch.bfloat16, requires_grad=True)
    lost = steps(torch.optim.AdamW([nearest], lr=1e-4, weight_decay=0.0), nearest)
    assert lost == 1.0
    parameter = torch.ones(20_000, dtype=torch.bfloat16, requires_grad=True)
    learned = steps(StochasticAdamW([parameter], lr=1e-4, weight_decay=0.0), parameter)
    assert learned == pytest.approx(0.96, abs=1e-3)


def test_the_update_is_torchs_adamw_up_to_rounding():
    torch.manual_seed(0)
    start, target = torch.randn(64, 33), torch.randn(64, 33)
    fp32 = start.bfloat16().float().requires_grad_(True)
    bf16 = start.bfloat16().requires_grad_(True)
    mine = StochasticAdamW([bf16], lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW([fp32], lr=1e-2, weight_decay=0.1)
    for _ in range(100):
        for optimizer, parameter in ((mine, bf16), (theirs, fp32)):
            optimizer.zero_grad()
            (parameter.float() - target).square().sum().backward()
            optimizer.step()
    assert (bf16.float() - fp32).norm() < 0.02 * fp32.norm()


def test_chunks_and_other_layouts_give_the_same_update(monkeypatch):
    def update(parameter):
        torch.manual_seed(1)
        optimizer = StochasticAdamW([parameter], lr=0.5)
        parameter.grad = torch.linspace(-1, 1, 12).view(3, 4).bfloat16()
        optimizer.step()
        return parameter.detach().float()

    values = torch.linspace(1, 2, 12).view(3, 4).bfloat16()
    whole = update(values.clone().requires_grad_(True))
    turned = update(values.t().contiguous().t().requires_grad_(True))
    monkeypatch.setattr(stochastic_rounding, "CHUNK", 5)
    parts = update(values.clone().requires_grad_(True))
    for other in (turned, parts):
        assert (whole - other).abs().max() <= 2**-7  # the next bf16 number at most


def test_weights_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="Stochastic rounding is for weights in bf16"):
        StochasticAdamW([torch.nn.Parameter(torch.ones(2))])

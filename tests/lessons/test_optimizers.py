"""Lessons 05 and 23: what they say of optimizer states in checkpoints, and of weights in bf16."""

import pytest
import torch
from torch import nn

from tests.lessons.cells import markdown_of, the_cell
from tight_fit.techniques.stochastic_rounding import StochasticAdamW


def test_rounded_to_nearest_most_weights_never_change_and_at_random_they_move_as_in_fp32():
    names = {"torch": torch, "nn": nn, "print": lambda *said: None}
    exec(the_cell("23", "def moved("), names)
    far = names["moved"](torch.optim.AdamW, torch.float32)
    nearest = names["moved"](torch.optim.AdamW, torch.bfloat16)
    at_random = names["moved"](StochasticAdamW, torch.bfloat16)
    assert (nearest == 0).float().mean() > 0.8 and nearest.mean() / far.mean() < 0.5
    assert float(at_random.mean()) == pytest.approx(float(far.mean()), rel=0.02)
    # Where they stay: the gap between bf16 numbers is more than twice a step of 1e-5.
    torch.manual_seed(0)
    start = (0.02 * torch.randn(100_000)).bfloat16().abs()
    assert (nearest[start > 2**-8] == 0).all()  # gaps of 2**-15 and more


@pytest.mark.parametrize("saved, missing", [("AdamW", "state1"), ("AdamW8bit", "exp_avg")])
def test_states_of_the_other_kind_load_and_fail_in_the_next_step(saved, missing):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    kinds = {"AdamW": torch.optim.AdamW, "AdamW8bit": bitsandbytes.optim.AdamW8bit}
    layer, state = torch.nn.Linear(128, 128), None
    for kind in (saved, *(kinds.keys() - {saved})):
        optimizer = kinds[kind](layer.parameters())
        layer(torch.ones(4, 128)).square().mean().backward()
        if state is None:
            optimizer.step()
            state = optimizer.state_dict()
    optimizer.load_state_dict(state)  # without a word
    with pytest.raises(KeyError, match=missing):
        optimizer.step()
    assert f"'{missing}'" in markdown_of("05")

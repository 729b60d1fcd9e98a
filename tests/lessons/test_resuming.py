"""Lesson 05: a checkpoint's optimizer states go on only in the optimizer that wrote them."""

import pytest
import torch

from tests.lessons.cells import markdown_of


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

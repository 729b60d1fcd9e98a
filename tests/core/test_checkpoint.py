"""Files of states: what the digest sees."""

import pytest
import torch

from helpers import checkpoint

TENSORS = {
    "weights": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16),
    "codes": torch.arange(5, dtype=torch.uint8), "flags": torch.tensor([True, False]),
    "step": torch.tensor(3.0), "nothing": torch.empty(0, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held | {"weights": held["weights"].reshape(3, 2)},
        lambda held: held | {"weights": held["weights"].double()},
        lambda held: held | {"weights": held["weights"] + 1e-6},
        lambda held: held | {"codes": held["codes"].view(torch.int8)},
        lambda held: held | {"nothing": torch.empty(4, 0)},
        lambda held: {name: value for name, value in held.items() if name != "nothing"},
        lambda held: held | {"more": torch.empty(0)},
    ],
)
def test_the_digest_changes_with_every_part_of_the_content(change):
    changed = change(TENSORS)
    assert checkpoint.digest("note", changed) != checkpoint.digest("note", TENSORS)


def test_the_digest_is_that_of_the_content_alone():
    turned = dict(reversed(TENSORS.items()))
    turned["weights"] = TENSORS["weights"].T.contiguous().T  # the same values, laid out otherwise
    assert checkpoint.digest("note", turned) == checkpoint.digest("note", TENSORS)
    assert checkpoint.digest("other", TENSORS) != checkpoint.digest("note", TENSORS)

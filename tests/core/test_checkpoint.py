"""Files of states: what the digest sees."""

import torch

from helpers import checkpoint

TENSORS = {
    "weights": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16),
    "codes": torch.arange(5, dtype=torch.uint8), "flags": torch.tensor([True, False]),
    "step": torch.tensor(3.0), "nothing": torch.empty(0, 4),
}  # fmt: skip


def test_the_digest_changes_with_every_part_of_the_content_and_with_nothing_else():
    weights = TENSORS["weights"]
    others = [
        {"weights": weights.reshape(3, 2)},
        {"weights": weights.double()},
        {"weights": weights + 1e-6},
        {"codes": TENSORS["codes"].view(torch.int8)},
        {"nothing": torch.empty(4, 0)},
        {"more": torch.empty(0)},
    ]
    changed = [TENSORS | other for other in others]
    changed.append({name: value for name, value in TENSORS.items() if name != "nothing"})
    digests = {checkpoint.digest("note", held) for held in [TENSORS, *changed]}
    assert len(digests | {checkpoint.digest("other", TENSORS)}) == len(changed) + 2
    turned = dict(reversed(TENSORS.items()))
    turned["weights"] = weights.T.contiguous().T  # the same values, laid out otherwise
    assert checkpoint.digest("note", turned) == checkpoint.digest("note", TENSORS)

"""Fields that go together are taken; tests/attack/test_recipes.py has those that do not."""

import numpy as np
import pytest
import torch

from helpers.recipe import Recipe


def test_a_record_of_before_has_the_fields_as_they_were():
    old = {"model": "vit", "lora_rank": 8, "optimizer": "adamw8bit"}
    assert Recipe.from_dict(old) == Recipe(**old)
    assert Recipe.from_dict(old).lora_targets == "query-value" and Recipe().base == "fp32"


# Numbers of NumPy and PyTorch are taken, and kept as Python's own.
TAKEN = [
    ("lora_alpha", np.float32(3.0), 3.0), ("lora_alpha", np.int64(4), 4),
    ("lora_alpha", torch.tensor(2.0), 2.0), ("lora_rank", np.int32(8), 8),
    ("lora_rank", torch.tensor(8), 8), ("compile", np.bool_(True), True),
    ("compile", torch.tensor(True), True), ("attention", np.str_("sdpa"), "sdpa"),
    ("base", np.str_("nf4"), "nf4"), ("loss", np.str_("chunked"), "chunked"),
    ("offload", np.str_("activations"), "activations"),
]  # fmt: skip


@pytest.mark.parametrize("name, value, plain", TAKEN, ids=str)
def test_scalars_of_other_packages_are_taken_as_pythons(name, value, plain):
    kept = getattr(Recipe(model="decoder", **{"lora_rank": 4, name: value}), name)
    assert kept == plain and type(kept) is type(plain)

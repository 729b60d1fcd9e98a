"""What is stored in 16 or 4 bits, and that the rest trains as before."""

import pytest
import torch

from helpers import models, train
from helpers.recipe import Recipe, replace
from tight_fit.techniques import base_weights
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step

DEBERTA = Recipe(batch_size=8, length=32, lora_rank=4, learning_rate=1e-3)
VIT = Recipe(model="vit", batch_size=8, lora_rank=4, learning_rate=1e-3)


def dtypes(model, trains: bool) -> set[torch.dtype]:
    return {value.dtype for value in model.parameters() if value.requires_grad == trains}


@pytest.mark.parametrize(
    "recipe, base, precision",
    [(DEBERTA, "bf16", "fp32"), (DEBERTA, "nf4", "bf16"), (VIT, "bf16", "bf16")],
    ids=str,
)
def test_the_frozen_base_is_stored_small_and_adapters_and_head_learn_in_fp32(
    recipe, base, precision
):
    recipe = replace(recipe, base=base, precision=precision, lora_targets="all-linear")
    model = models.build(recipe)
    packed = {torch.uint8} if base == "nf4" else set()
    assert dtypes(model, trains=False) == {torch.bfloat16, *packed}
    assert dtypes(model, trains=True) == {torch.float32}
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = make_optimizer(model, recipe)
    batch = train.encoded(recipe)["train"].batch(range(8))
    losses = [train_step(model, optimizer, [batch], 8, recipe).item() for _ in range(6)]
    assert losses[-1] < losses[0]
    values = dict(model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in frozen.items())


def test_without_adapters_all_weights_are_bf16_and_train():
    model = models.build(Recipe(model="vit", base="bf16"))
    assert dtypes(model, trains=True) == {torch.bfloat16} and not dtypes(model, trains=False)


def test_nf4_in_fp16_has_no_bf16_beside_it():
    model = models.build(replace(VIT, base="nf4", precision="fp16"))
    assert dtypes(model, trains=False) == {torch.float16, torch.uint8}


def test_rslora_multiplies_by_alpha_over_the_root_of_the_rank():
    for scale, alpha, expected in (
        ("alpha/r", None, 2.0),
        ("alpha/r", 4.0, 1.0),
        ("alpha/sqrt(r)", None, 4.0),
        ("alpha/sqrt(r)", 6.0, 3.0),
    ):
        model = models.build(replace(VIT, lora_scale=scale, lora_alpha=alpha))
        adapted = [module.scaling for module in model.modules() if hasattr(module, "lora_A")]
        scalings = {value for scaling in adapted for value in scaling.values()}
        assert scalings == {expected}


def test_a_head_takes_its_own_dtype_and_autocast_casts_by_itself():
    head, given = torch.nn.Linear(2, 2), (torch.ones(1, 2, dtype=torch.bfloat16), "more")
    assert base_weights._in_dtype_of_weight(head, (torch.ones(1, 2),)) is None
    cast, more = base_weights._in_dtype_of_weight(head, given)
    assert cast.dtype == torch.float32 and more == "more"
    with torch.autocast("cpu", torch.bfloat16):
        assert base_weights._in_dtype_of_weight(head, given) is None

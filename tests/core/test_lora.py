"""Low-rank adapters: where they stand, what trains, and how they are saved."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as Adapted
from torch import nn

from helpers import models, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.small import without_dropout
from tight_fit.techniques.step import loss_sum

MINI = {
    "deberta": Recipe(length=24, batch_size=8, lora_rank=4),
    "vit": Recipe(model="vit", batch_size=8, lora_rank=4),
}
HEADS = {"deberta": ["pooler", "classifier"], "vit": ["classifier"]}
BOTH = pytest.mark.parametrize("model", MINI)


def batch(recipe: Recipe) -> dict[str, torch.Tensor]:
    return train.encoded(recipe)["train"].batch(range(8))


def adapters(model: nn.Module) -> dict[str, Adapted]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def shaken(model: nn.Module) -> nn.Module:
    """With a B that is not zero, so that the adapters do something."""
    torch.manual_seed(3)
    for module in adapters(model).values():
        nn.init.normal_(module.lora_B["default"].weight, std=0.2)
    return model


@pytest.mark.parametrize("model, frozen, layers", [("deberta", None, 4), ("vit", 3, 1)])
def test_frozen_layers_get_no_adapter(model, frozen, layers):
    recipe = replace(MINI[model], frozen=frozen)
    names = adapters(models.build(recipe))
    assert len(names) == 2 * layers
    assert not any(f".{k}." in name for name in names for k in range(4 - layers))
    width = {"deberta": 128, "vit": 96}[model]
    a_layer = 2 * 4 * 2 * width  # two matrices of rank 4, each with an A and a B
    plain = plan(replace(recipe, lora_rank=None), "cpu").parameters
    assert plan(recipe, "cpu").parameters == plain + a_layer * layers


@BOTH
def test_the_librarys_wrapper_gives_the_recipes_gradients(model):
    """As a reader of peft's documentation makes the same adapters."""
    recipe, prefix = MINI[model], "base_model.model."
    ours = shaken(without_dropout(models.build(recipe)))
    settings = LoraConfig(
        r=recipe.lora_rank, lora_alpha=2 * recipe.lora_rank, task_type="SEQ_CLS",
        target_modules=list(models.TARGETS[recipe.task]), modules_to_save=HEADS[model],
    )  # fmt: skip
    plain = without_dropout(models.build(replace(recipe, lora_rank=None)))
    theirs = get_peft_model(plain, settings)
    for name, module in adapters(ours).items():  # drawn by other random numbers
        adapters(theirs)[prefix + name].load_state_dict(module.state_dict())
    found = []
    for net in (ours, theirs):
        loss_sum(net, batch(recipe), recipe).backward()
        trained = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
        named = [
            name.removeprefix(prefix).replace("modules_to_save.default.", "") for name in trained
        ]
        found.append(dict(zip(named, trained.values())))
    one, other = found
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-7)

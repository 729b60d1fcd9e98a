"""Low-rank adapters: what trains, what they compute, how they are merged and saved.

And how a library's defaults leave a head untrained.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as Adapted
from safetensors.torch import load_file, save_file
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


def batch(recipe: Recipe, rows=range(8)) -> dict[str, torch.Tensor]:
    return train.encoded(recipe)["train"].batch(rows)


def adapters(model: nn.Module) -> dict[str, Adapted]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def shaken(model: nn.Module) -> nn.Module:
    """With a B that is not zero, so that the adapters do something."""
    torch.manual_seed(3)
    for module in adapters(model).values():
        nn.init.normal_(module.lora_B["default"].weight, std=0.2)
    return model


def logits(model: nn.Module, recipe: Recipe) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(
            **{name: value for name, value in batch(recipe).items() if name != "labels"}
        ).logits


def gradients(model: nn.Module, recipe: Recipe) -> dict[str, torch.Tensor | None]:
    """By the recipe's names: peft's wrappers are taken off."""
    loss_sum(model, batch(recipe), recipe).backward()
    return {
        name.removeprefix("base_model.model.").replace(
            "modules_to_save.default.", ""
        ): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def wrapped(
    recipe: Recipe, task_type: str | None = "SEQ_CLS", heads: list[str] | None = None
) -> nn.Module:
    """The same adapters as a reader of peft's documentation makes them."""
    model = without_dropout(models.build(replace(recipe, lora_rank=None)))
    settings = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=2 * recipe.lora_rank,
        task_type=task_type,
        target_modules=list(models.TARGETS[recipe.task]),
        modules_to_save=heads,
    )
    return get_peft_model(model, settings)


# -- where they stand ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, profile, width, layers",
    [("deberta", "mini", 128, 4), ("vit", "mini", 96, 4), ("deberta", "full", 768, 12),
     ("deberta-large", "full", 1024, 24), ("vit", "full", 768, 12)],
)  # fmt: skip
def test_the_targets_exist_in_every_layer(model, profile, width, layers):
    recipe = Recipe(model, profile=profile)
    with torch.device("meta"):
        net = models.CLASSES[recipe.task](models.config(recipe))
    for target in models.TARGETS[recipe.task]:
        projections = [
            module for name, module in net.named_modules() if name.split(".")[-1] == target
        ]
        assert [
            (type(module), module.in_features, module.out_features) for module in projections
        ] == [(nn.Linear, width, width)] * layers


@BOTH
@pytest.mark.parametrize("frozen, layers", [(None, 4), (1, 3), (3, 1)])
def test_frozen_layers_get_no_adapter(model, frozen, layers):
    recipe = replace(MINI[model], frozen=frozen)
    names = adapters(models.build(recipe))
    assert len(names) == 2 * layers
    assert not any(f".{k}." in name for name in names for k in range(4 - layers))
    a_layer = (
        2 * 4 * 2 * {"deberta": 128, "vit": 96}[model]
    )  # two matrices of rank 4, each with an A and a B
    plain = plan(replace(recipe, lora_rank=None), "cpu").parameters
    assert plan(recipe, "cpu").parameters == plain + a_layer * layers


# -- what trains -----------------------------------------------------------------------------------


@BOTH
def test_the_librarys_wrapper_gives_the_recipes_gradients(model):
    recipe = MINI[model]
    ours = shaken(without_dropout(models.build(recipe)))
    theirs = wrapped(recipe, heads=HEADS[model])
    for name, module in adapters(ours).items():  # drawn by other random numbers
        adapters(theirs)[f"base_model.model.{name}"].load_state_dict(module.state_dict())
    one, other = gradients(ours, recipe), gradients(theirs, recipe)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-7)


# -- what is saved ---------------------------------------------------------------------------------


@BOTH
def test_the_adapter_alone_is_saved_and_loaded(model, tmp_path):
    recipe = MINI[model]
    net = shaken(models.build(replace(recipe, seed=1)))
    save_file(
        {name: value.detach() for name, value in net.named_parameters() if value.requires_grad},
        tmp_path / "adapter.safetensors",
    )
    save_file(
        {name: value.detach() for name, value in net.named_parameters()},
        tmp_path / "all.safetensors",
    )
    assert (tmp_path / "adapter.safetensors").stat().st_size < 0.2 * (
        tmp_path / "all.safetensors"
    ).stat().st_size
    fresh = models.build(replace(recipe, seed=2))
    assert not torch.equal(logits(fresh, recipe), logits(net, recipe))
    lost = fresh.load_state_dict(load_file(tmp_path / "adapter.safetensors"), strict=False)
    assert not lost.unexpected_keys
    assert not any(
        "lora_" in name or name.startswith(models.NEW_HEADS) for name in lost.missing_keys
    )
    assert torch.equal(logits(fresh, recipe), logits(net, recipe))


# -- with the other techniques ---------------------------------------------------------------------


def test_the_embeddings_hook_sends_the_backward_pass_through_frozen_layers():
    """transformers' checkpointing makes a text model's embeddings require a gradient.

    The non-reentrant kind does not need it: without it the gradients are the same, and frozen
    layers are not computed again.
    """
    recipe = replace(MINI["deberta"], frozen=2, checkpointing=True)
    hooked, free = (
        plan(recipe, "cpu", change=change).flops
        for change in (
            lambda model: model.enable_input_require_grads(),
            lambda model: model.disable_input_require_grads(),
        )
    )
    assert hooked["recompute"] > 1.9 * free["recompute"]
    assert hooked["backward"] > 1.8 * free["backward"]
    seen = []
    for change in (nn.Module.train, lambda net: net.disable_input_require_grads()):
        net = shaken(models.build(recipe))
        change(net)
        torch.manual_seed(5)
        seen.append(gradients(net, recipe))
    assert seen[0].keys() == seen[1].keys()
    for name, value in seen[0].items():
        torch.testing.assert_close(seen[1][name], value, rtol=1e-4, atol=1e-6)

"""What corrupts training in silence.

Weights in half precision, frozen heads, missing gradients, a checkpoint that was half read.
"""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import models, train
from helpers.plan import plan
from helpers.recipe import MODELS, Recipe, replace
from tight_fit.techniques import model_changes

CLASSIFIERS = {"deberta": Recipe(length=16, batch_size=4), "vit": Recipe(model="vit", batch_size=4)}
MINI = CLASSIFIERS | {"decoder": Recipe(model="decoder", length=32, batch_size=4)}


@pytest.mark.parametrize("model", MINI)
def test_pretrained_weights_are_the_files_in_fp32_and_random_ones_have_their_shapes(model):
    """transformers loads a checkpoint in its stored dtype; ours are stored like the hub's."""
    trained, random = (
        models.build(replace(MINI[model], weights=kind)) for kind in ("pretrained", "random")
    )
    classes = MINI[model].classes if model in CLASSIFIERS else trained.config.num_labels
    assert trained.config.num_labels == random.config.num_labels == classes
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    shapes = [{name: p.shape for name, p in net.named_parameters()} for net in (trained, random)]
    assert shapes[0] == shapes[1]
    stored = load_file(models.MINI / model / "model.safetensors").values()
    assert {value.dtype for value in stored} == {torch.float16}
    for name, value in trained.named_parameters():
        if not name.startswith(models.NEW_HEADS):  # the library renames some on the way
            assert any(
                value.shape == other.shape and torch.equal(value, other.float()) for other in stored
            ), name


@pytest.mark.parametrize("model", ["deberta", "decoder"])
def test_a_parameter_that_does_not_train_is_named(model):
    net = models.build(MINI[model])
    next(net.parameters()).requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not train"):
        model_changes.check_trainable(net)
    with pytest.raises(RuntimeError, match="dtype=torch.float32"):
        model_changes.check_trainable(models.build(MINI[model]).half())


@pytest.mark.parametrize("frozen", [0, 2, 4])
@pytest.mark.parametrize("model", MINI)
def test_frozen_are_the_embeddings_and_the_lowest_layers(model, frozen):
    recipe = replace(MINI[model], frozen=frozen)
    still = models.frozen_names(models.build(recipe), recipe)
    layers = {int(match[1]) for name in still if (match := re.search(r"layers?\.(\d+)\.", name))}
    assert layers == set(range(frozen)) and any("embed" in name for name in still)


def test_below_the_lowest_trained_layer_there_is_no_backward():
    """With all layers frozen only the head's FLOPs are left, and no layer keeps activations."""
    for model, head in (("deberta", 3 * 2 * 4 * 128 * (128 + 8)), ("vit", 2 * 2 * 4 * 96 * 10)):
        flops = plan(replace(MINI[model], frozen=4), "cpu").flops
        assert flops["backward"] <= head
    half, whole = (
        plan(Recipe(model="vit", profile="full", frozen=k)).highest["activations"]
        for k in (6, None)
    )
    assert half < 0.55 * whole


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_the_same_seed_makes_the_same_head(model):
    one, two, other = (models.build(replace(MINI[model], seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(one.classifier.weight, two.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)


def test_a_checkpoint_that_lacks_a_layer_is_refused(tmp_path, monkeypatch):
    shutil.copytree(models.MINI / "vit", tmp_path / "vit")
    file = tmp_path / "vit" / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if "layer" in name and name.endswith("weight"))]
    save_file(tensors, file, metadata={"format": "pt"})
    monkeypatch.setattr(models, "MINI", tmp_path)
    with pytest.raises(RuntimeError, match="lacks 1 tensors"):
        models.build(MINI["vit"])


QWEN3 = {
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    "num_hidden_layers": 28, "tie_word_embeddings": True,
}  # fmt: skip
PUBLISHED = {  # the parts of each config.json that decide shapes, as its repository shows them
    "deberta": {
        "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072,
        "vocab_size": 128100, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "deberta-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    "vit": {"hidden_size": 768, "image_size": 224, "patch_size": 16},
    "decoder": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "decoder-1.7b": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
}  # fmt: skip
ALIKE = """model_type hidden_act relative_attention share_att_key norm_rel_ebd pos_att_type qkv_bias
    position_biased_input type_vocab_size hidden_dropout_prob tie_word_embeddings attention_bias
    attention_dropout rms_norm_eps"""


def test_full_configurations_are_the_published_ones_and_mini_have_their_architecture():
    for name, published in PUBLISHED.items():
        full = models.config(Recipe(name, profile="full")).to_dict()
        assert {field: full[field] for field in published} == published, name
        if "decoder" in name:
            assert full["rope_parameters"]["rope_theta"] == 1_000_000, name
        if name in MINI:
            mini = models.config(MINI[name]).to_dict()
            other = [one for one in ALIKE.split() if mini.get(one) != full.get(one)]
            assert not other, f"mini and full {name} differ in {other}"


def test_the_full_architecture_runs_without_a_hub(monkeypatch, tmp_path):
    """A GPU and no internet: random weights, the mini tokenizer, the offline data."""

    def refuse(kind, repo):
        raise models.hub.HubUnavailable(f"{repo} cannot be loaded.")

    for name, value in {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(models.hub, "find", refuse)
    fields = {"profile": "full", "weights": "random", "batch_size": 2, "train_size": 8}
    text = Recipe(**fields, data="r8", test_size=8, length=8)
    batch = train.encoded(text)["train"].batch([0, 1])
    assert batch["input_ids"].max() < models.config(text).vocab_size
    image = Recipe("vit", **fields, data="digits")
    assert train.encoded(image)["train"].batch([0, 1])["pixel_values"].shape == (2, 3, 224, 224)
    chat = replace(text, model="decoder", length=32)
    assert train.encoded(chat)["train"].batch([0, 1])["labels"].shape == (2, 32)
    with pytest.raises(models.hub.HubUnavailable):
        models.processor(replace(text, weights="pretrained"))


def test_the_table_of_models_agrees_with_their_configurations():
    for name, model in MODELS.items():
        for profile in model.data:
            shape = models.config(Recipe(name, profile=profile))
            assert model.layers[profile] == shape.num_hidden_layers, name
            assert model.width[profile] == shape.hidden_size, name
            if model.positions:
                assert model.positions[profile] == shape.max_position_embeddings, name

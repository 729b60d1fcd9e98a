"""What corrupts training in silence.

Weights in half precision, frozen heads, missing gradients, a checkpoint that was half read.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers import models, train
from helpers.plan import plan
from helpers.recipe import MODELS, Recipe, replace
from tight_fit.techniques import model_changes

CLASSIFIERS = {"deberta": Recipe(length=16, batch_size=4), "vit": Recipe(model="vit", batch_size=4)}
MINI = CLASSIFIERS | {"decoder": Recipe(model="decoder", length=32, batch_size=4)}


@pytest.mark.parametrize("model", MINI)
def test_stored_in_fp16_loaded_in_fp32(model):
    """transformers loads a checkpoint in its stored dtype; ours are stored like the hub's."""
    with safe_open(models.MINI / model / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}
    assert {parameter.dtype for parameter in models.build(MINI[model]).parameters()} == {
        torch.float32
    }
    with pytest.raises(RuntimeError, match="dtype=torch.float32"):
        model_changes.check_trainable(models.build(MINI[model]).half())


@pytest.mark.parametrize("model", MINI)
def test_a_parameter_that_does_not_train_is_named(model):
    net = models.build(MINI[model])
    next(net.parameters()).requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not train"):
        model_changes.check_trainable(net)


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


@pytest.mark.parametrize("model", MINI)
def test_pretrained_weights_are_the_files_and_random_ones_have_their_shapes(model):
    trained, random = (
        models.build(replace(MINI[model], weights=kind)) for kind in ("pretrained", "random")
    )
    classes = MINI[model].classes if model in CLASSIFIERS else trained.config.num_labels
    names = [name for name, _ in trained.named_parameters()]
    assert names == [name for name, _ in random.named_parameters()]
    assert trained.config.num_labels == random.config.num_labels == classes
    stored = list(
        load_file(models.MINI / model / "model.safetensors").values()
    )  # the library renames some on the way
    for name, value in trained.named_parameters():
        if not name.startswith(models.NEW_HEADS):
            assert any(
                value.shape == other.shape and torch.equal(value, other.float()) for other in stored
            ), name


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_the_same_seed_makes_the_same_head(model):
    one, two, other = (models.build(replace(MINI[model], seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(one.classifier.weight, two.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)


def test_a_checkpoint_that_lacks_a_layer_is_refused(tmp_path, monkeypatch):
    shutil.copytree(models.MINI / "vit", tmp_path / "vit")
    tensors = load_file(tmp_path / "vit" / "model.safetensors")
    lost = next(name for name in tensors if "layer" in name and name.endswith("weight"))
    del tensors[lost]
    save_file(tensors, tmp_path / "vit" / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(models, "MINI", tmp_path)
    with pytest.raises(RuntimeError, match="lacks 1 tensors"):
        models.build(MINI["vit"])


def test_the_full_configurations_are_the_published_ones():
    """Against the parts of each config.json that decide shapes, as its repository shows them."""
    base = models.config(Recipe(profile="full"))
    large = models.config(Recipe(profile="full", model="deberta-large"))
    vit = models.config(Recipe(profile="full", model="vit"))
    assert (base.intermediate_size, base.vocab_size) == (3072, 128100)
    assert (large.hidden_size, large.num_hidden_layers, large.num_attention_heads) == (1024, 24, 16)
    assert (base.hidden_size, base.num_hidden_layers) == (768, 12)
    assert (vit.hidden_size, vit.image_size, vit.patch_size) == (768, 224, 16)
    small, larger = (
        models.config(Recipe(profile="full", model=name)) for name in ("decoder", "decoder-1.7b")
    )
    assert (small.hidden_size, small.intermediate_size) == (1024, 3072)
    assert (larger.hidden_size, larger.intermediate_size) == (2048, 6144)
    for shape in (small, larger):
        heads = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        assert heads == (16, 8, 128) and shape.tie_word_embeddings
        assert (shape.num_hidden_layers, shape.vocab_size) == (28, 151_936)
        assert shape.rope_parameters["rope_theta"] == 1_000_000
    assert base.position_buckets == 256
    assert base.pos_att_type == ["p2c", "c2p"]
    assert not base.position_biased_input


ALIKE = """hidden_act relative_attention share_att_key norm_rel_ebd pos_att_type qkv_bias
    position_biased_input type_vocab_size hidden_dropout_prob tie_word_embeddings attention_bias
    attention_dropout rms_norm_eps"""


def test_mini_and_full_have_the_same_architecture():
    for model in MINI:
        mini, full = (
            json.loads(
                models.config(Recipe(model=model, profile=profile)).to_json_string(use_diff=False)
            )
            for profile in ("mini", "full")
        )
        assert mini["model_type"] == full["model_type"]
        for name in ALIKE.split():
            assert mini.get(name) == full.get(name), name


def test_the_full_architecture_runs_without_a_hub(monkeypatch, tmp_path):
    """A GPU and no internet: random weights, the mini tokenizer, the offline data."""
    for name, value in {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(models.hub, "find", _refuse)
    random = {"profile": "full", "weights": "random", "batch_size": 2}
    text = Recipe(**random, data="r8", train_size=8, test_size=8, length=8)
    batch = train.encoded(text)["train"].batch([0, 1])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["input_ids"].max() < models.config(text).vocab_size
    image = Recipe("vit", **random, data="digits", train_size=16)
    assert train.encoded(image)["train"].batch([0, 1])["pixel_values"].shape == (2, 3, 224, 224)
    chat = replace(text, model="decoder", length=32)
    assert train.encoded(chat)["train"].batch([0, 1])["labels"].shape == (2, 32)
    with pytest.raises(models.hub.HubUnavailable):
        models.processor(replace(text, weights="pretrained"))


def _refuse(kind, repo):
    raise models.hub.HubUnavailable(f"{repo} cannot be loaded.")


@pytest.mark.parametrize(
    "model, profile", [(name, profile) for name, model in MODELS.items() for profile in model.data]
)
def test_the_table_of_models_agrees_with_their_configurations(model, profile):
    shape = models.config(Recipe(model=model, profile=profile))
    assert MODELS[model].layers[profile] == shape.num_hidden_layers
    assert MODELS[model].width[profile] == shape.hidden_size
    if MODELS[model].positions:
        assert MODELS[model].positions[profile] == shape.max_position_embeddings

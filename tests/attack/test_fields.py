"""Newer fields of a recipe: values and pairs of techniques that make no step, near names."""

import dataclasses
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from transformers import BertConfig, Qwen3Config, ViTConfig

from helpers.recipe import Recipe, difference
from tests.attack import refused
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model

WRONG = (ValueError, TypeError)
HUGE = 10**5000
CHAT = {"model": "decoder"}
LORA = {**CHAT, "lora_rank": 4}
EARLY = {"optimizer_in_backward": True, "max_grad_norm": None}
NAMES = ("attention", "base", "lora_targets", "lora_scale", "loss", "offload", "float8")
NO_NAMES = ("", "no such", 0, 1, -1, 1.5, True, math.nan, HUGE, b"sdpa", ["sdpa"], {}, "x" * 9999)
FLAGS = ("compile", "optimizer_in_backward")
NO_FLAGS = (0, 1, -1, "", "yes", "True", None, 1.0, math.nan, [], {}, b"1", HUGE)
NO_SCALES = (0, 0.0, -1, math.nan, math.inf, -math.inf, HUGE, -HUGE, "16", True, 1j, [16], {})
NO_SCALES += (Decimal(16), Fraction(1, 2), np.array([1.0, 2.0]), np.float64("nan"), b"16")


def short(value):
    """A name for a case: pytest's own would write numbers and texts out."""
    if isinstance(value, int) and abs(value) > 2**70:
        return "huge"
    return re.sub(r"\W+", "_", repr(value)[:40])


@pytest.mark.parametrize("value", NO_NAMES, ids=short)
@pytest.mark.parametrize("name", NAMES)
def test_a_technique_has_a_name(name, value):
    said = refused(WRONG, name, lambda: Recipe(**{**LORA, name: value}))
    assert len(said) < 300


@pytest.mark.parametrize("value", NO_FLAGS, ids=short)
@pytest.mark.parametrize("name", FLAGS)
def test_a_technique_is_on_or_off(name, value):
    refused(TypeError, [name, "True or False"], lambda: Recipe(**{**CHAT, name: value}))


@pytest.mark.parametrize("value", NO_SCALES, ids=short)
def test_a_scale_of_adapters_is_a_number_above_0(value):
    refused(WRONG, "lora_alpha", lambda: Recipe(**LORA, lora_alpha=value))
    refused(WRONG, "lora_alpha", lambda: ModelStep(SMALL, lora_rank=4, lora_alpha=value))


NEAR = [
    ("model", "Decoder", "decoder"),
    ("model", "vitt", "vit"),
    ("model", "deberta_large", "deberta-large"),
    ("profile", "minni", "mini"),
    ("weights", "pretrain", "pretrained"),
    ("data", "R8", "r8"),
    ("data", "news_groups", "newsgroups"),
    ("padding", "Fixed", "fixed"),
    ("padding", "dynamical", "dynamic"),
    ("precision", "BF16", "bf16"),
    ("precision", "fp-16", "fp16"),
    ("optimizer", "AdamW", "adamw"),
    ("optimizer", "adamw8bits", "adamw8bit"),
    ("optimizer", "adamw_8bit", "adamw8bit"),
    ("optimizer", "paged_adamw_8bit", "paged_adamw8bit"),
    ("optimizer", "adafacter", "adafactor"),
    ("optimizer", "adamw_stochastics", "adamw_stochastic"),
    ("attention", "SDPA", "sdpa"),
    ("attention", "eagre", "eager"),
    ("base", "NF4", "nf4"),
    ("base", "bf-16", "bf16"),
    ("lora_targets", "all_linear", "all-linear"),
    ("lora_targets", "query_value", "query-value"),
    ("lora_scale", "alpha/sqrt", "alpha/sqrt(r)"),
    ("loss", "chunk", "chunked"),
    ("offload", "optimiser", "optimizer"),
    ("offload", "activation", "activations"),
]


@pytest.mark.parametrize("name, typed, meant", NEAR)
def test_what_is_near_a_name_is_asked_back(name, typed, meant):
    more = LORA if name.startswith("lora") or name == "base" else {}
    refused(ValueError, f"Did you mean {meant!r}?", lambda: Recipe(**{**more, name: typed}))


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("lora_target", "lora_targets"),
        ("attentions", "attention"),
        ("optimizer_in_backwards", "optimizer_in_backward"),
        ("ofload", "offload"),
        ("float_8", "float8"),
        ("compiled", "compile"),
        ("checkpoint", "checkpointing"),
        ("learningrate", "learning_rate"),
        ("batchsize", "batch_size"),
    ],
)
def test_what_is_near_a_field_is_asked_back(typed, meant):
    refused(ValueError, f"Did you mean {meant}?", lambda: Recipe.from_dict({typed: 1}))


PAIRS = {
    "nf4 without adapters": ({"base": "nf4"}, "lora_rank"),
    "targets without adapters": ({"lora_targets": "all-linear"}, "there are none"),
    "alpha without adapters": ({"lora_alpha": 8.0}, "there are none"),
    "scale without adapters": ({"lora_scale": "alpha/sqrt(r)"}, "there are none"),
    "bf16 base under fp16": ({"base": "bf16", "precision": "fp16"}, "does not mix"),
    "bf16 base and adapters under fp16": (
        {"base": "bf16", "precision": "fp16", "lora_rank": 4},
        "does not mix",
    ),
    "stochastic on fp32": ({"optimizer": "adamw_stochastic"}, "base='bf16'"),
    "stochastic beside adapters": (
        {"optimizer": "adamw_stochastic", "base": "bf16", "lora_rank": 4},
        "without adapters",
    ),
    "stochastic on nf4": (
        {"optimizer": "adamw_stochastic", "base": "nf4", "lora_rank": 4},
        "without adapters",
    ),
    "compiled and activations away": (
        {"compile": True, "offload": "activations"},
        "one of the two",
    ),
    "8 bits beside adapters": ({**LORA, "float8": "rowwise"}, "leave lora_rank or float8 out"),
    "8 bits and frozen layers": ({**CHAT, "frozen": 1, "float8": "rowwise"}, "leave frozen"),
    "8 bits under fp16": ({**CHAT, "precision": "fp16", "float8": "tensorwise"}, "bf16"),
    "early and clipped": ({"optimizer_in_backward": True}, "max_grad_norm=None"),
    "early and accumulated": ({**EARLY, "accumulation": 2}, "accumulation=1"),
    "early under fp16": ({**EARLY, "precision": "fp16"}, "overflowed"),
    "adapters in no layer": ({"lora_rank": 4, "frozen": 6}, "all layers are frozen"),
    "a rank above the width": ({"lora_rank": 129}, "129"),
    **{
        f"{optimizer} on the host": (
            {"optimizer": optimizer, "offload": "optimizer"},
            "made for a GPU",
        )
        for optimizer in ("adamw8bit", "adamw8bit_embed32", "lion", "lion8bit", "paged_adamw8bit")
    },
}


@pytest.mark.parametrize("fields, says", PAIRS.values(), ids=PAIRS)
def test_techniques_that_do_not_go_together(fields, says):
    refused(ValueError, says, lambda: Recipe(**{**CHAT, **fields}))


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"model": "deberta", "attention": "sdpa"}, "'eager' alone"),
        ({"model": "deberta", "loss": "chunked"}, "language models"),
        ({"model": "vit", "loss": "chunked"}, "language models"),
        ({"model": "decoder", "length": 513}, "512 tokens"),
        ({"model": "decoder-1.7b"}, "profile='full'"),
        ({"model": "decoder", "data": "digits"}, "reads texts"),
        ({"model": "decoder", "base": None}, "base=None"),
    ],
    ids=short,
)
def test_techniques_that_the_model_does_not_have(fields, says):
    refused(ValueError, says, lambda: Recipe(**fields))


@pytest.mark.parametrize("thing", [None, 3, "vit", {}, []], ids=short)
def test_a_difference_is_one_of_recipes(thing):
    refused(TypeError, "of type Recipe", lambda: difference(Recipe(), thing))
    refused(TypeError, "of type Recipe", lambda: difference(thing, Recipe()))


# -- a step of any model

SMALL = Qwen3Config(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=128, vocab_size=99, head_dim=32, max_position_embeddings=64,
)  # fmt: skip
BERT = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=99)
VIT = ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=99)
OF_ANY = {
    "a rank above the width": (SMALL, {"lora_rank": 65}, "64 columns"),
    "adapters in no layer": (SMALL, {"lora_rank": 4, "frozen": 2}, "all layers are frozen"),
    "classes of the next token": (SMALL, {"classes": 3}, "is for a classifier"),
    "classes of hidden tokens": (BERT, {"classes": 3, "task": "masked-lm"}, "is for a classifier"),
    "chunks of a classifier": (BERT, {"loss": "chunked"}, "next token"),
    "chunks of images": (VIT, {"loss": "chunked"}, "next token"),
    "a length of images": (VIT, {"length": 16}, "is for text"),
    "a side of texts": (SMALL, {"side": 16}, "is for images"),
    "two dtypes": (SMALL, {"base": "bf16", "weights": "fp32"}, "two dtypes"),
    "fp16 that trains": (SMALL, {"weights": "fp16"}, "cannot be trained"),
    "fp16 as a base": (SMALL, {"base": "fp16", "lora_rank": 4}, "base='fp16'"),
    "no layers": (SMALL, {"lora_rank": 4, "lora_targets": ""}, "names no layer"),
    "only commas": (SMALL, {"lora_rank": 4, "lora_targets": ",,"}, "names no layer"),
    "other layers": (
        SMALL,
        {"lora_rank": 4, "lora_targets": "q_prj"},
        "no linear layer called q_prj",
    ),
    "a list of layers": (SMALL, {"lora_rank": 4, "lora_targets": ["q_proj"]}, "must be a text"),
    "more layers than there are": (SMALL, {"frozen": 3}, "2 layers"),
    "longer than positions": (SMALL, {"length": 65}, "64 tokens"),
}


@pytest.mark.parametrize("config, fields, says", OF_ANY.values(), ids=OF_ANY)
def test_a_step_of_any_model_that_cannot_be(config, fields, says):
    refused(WRONG, says, lambda: plan_model(config, **fields))


@pytest.mark.parametrize("value", NO_NAMES, ids=short)
@pytest.mark.parametrize("name", ["attention", "base", "lora_scale", "loss", "offload"])
def test_a_step_of_any_model_has_known_techniques(name, value):
    refused(WRONG, name, lambda: ModelStep(SMALL, lora_rank=4, **{name: value}))


@pytest.mark.parametrize("value", NO_FLAGS, ids=short)
@pytest.mark.parametrize("name", FLAGS)
def test_a_step_of_any_model_has_them_on_or_off(name, value):
    refused(TypeError, name, lambda: ModelStep(SMALL, **{name: value}))


def test_every_field_that_names_a_technique_is_tried():
    new = {field.name for field in dataclasses.fields(Recipe)} - {
        *("model profile weights data train_size test_size length batch_size accumulation".split()),
        *("padding precision optimizer checkpointing frozen lora_rank steps seed".split()),
        *("learning_rate weight_decay warmup max_grad_norm".split()),
    }
    assert new == {*NAMES, *FLAGS, "lora_alpha"}

"""Recipes and steps: any values of any fields, near names, techniques in pairs, data."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import BertConfig, Qwen3Config, ViTConfig

from helpers import data, models, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.attack import one_sentence, refused
from tests.attack.wrong import DRAWN, HUGE, KNOWN, SHORT, WRONG
from tests.combinations import VALUES
from tests.small import configured
from tight_fit.checks import DATASETS, MODELS, PADDINGS, PROFILES, shown
from tight_fit.checks import WEIGHTS as INITIAL
from tight_fit.layouts.layout import parse
from tight_fit.models.config import TASKS, WEIGHTS
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model
from tight_fit.techniques.references import REFERENCES
from tight_fit.techniques.rules import LORA_SCALES

KNOWN_WRONG = [value for kind in KNOWN.values() for value in kind]
ODD = st.sampled_from(KNOWN_WRONG) | st.one_of(*DRAWN.values())
NAMED = {
    **VALUES, "model": tuple(MODELS), "profile": PROFILES, "weights": INITIAL, "padding": PADDINGS,
    "data": (None, *DATASETS), "lora_scale": LORA_SCALES, "compile": (False, True),
}  # fmt: skip
OF_RECIPE = NAMED | {
    "batch_size": (1, 4, 16), "length": (None, 3, 64, 600), "lora_rank": (None, 4, 128, 129),
    "frozen": (None, 0, 4, 6), "lora_alpha": (None, 8, 0.5), "steps": (1, 60),
    "seed": (0, 2**32 - 1), "train_size": (None, 8), "test_size": (None, 500),
    "learning_rate": (None, 1e-3), "weight_decay": (0.0, 0.1), "warmup": (0.0, 1.0),
    "max_grad_norm": (None, 1.0),
}  # fmt: skip
OF_STEP = {name: OF_RECIPE[name] for name in OF_RECIPE.keys() & {
    field.name for field in dataclasses.fields(ModelStep)}} | {
    "weights": (None, *WEIGHTS), "task": (None, *TASKS), "side": (None, 16), "classes": (None, 3),
    "reference": (None, *REFERENCES), "completion": (None, 4), "flash": (True, False),
    "kbit": (False, True), "base": (None, *VALUES["base"]), "peak_learning_rate": (2e-5,),
    "lora_targets": ("query-value", "all-linear", "q_proj", "q_prj", "", ",,"),
}  # fmt: skip
tried = settings(max_examples=400, deadline=None, derandomize=True, database=None)


def drawn(values):
    """A few fields with values that they may have, and at times one that has none of them."""
    some = st.lists(st.sampled_from(sorted(values)), max_size=6, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: st.sampled_from(values[name]) for name in names})
    )
    odd = st.dictionaries(st.sampled_from(sorted(values)), ODD, max_size=1)
    return st.tuples(some, odd | st.just({})).map(lambda two: two[0] | two[1])


def made(kind, fields, names):
    """What is made of the fields, or None where one short sentence names one of them."""
    try:
        return kind(**fields)
    except WRONG as error:
        said = one_sentence(str(error))
        assert len(said) < SHORT and any(name in said for name in names), said
        return None


def test_a_whole_number_is_shown_whole_or_by_its_digits():
    """Where it was cut, it would be another number."""
    for digits in (58, 59, 60, 61, 5000):
        for number in (10 ** (digits - 1), 10**digits - 1, -(10**digits) + 1):
            text = shown(number)
            about = re.fullmatch(r"a number of about (\d+) digits", text)
            assert abs(int(about[1]) - digits) <= 1 if about else text == str(number)


# Each was once taken, or refused without its name.
@example({"lora_rank": 4, "lora_alpha": math.nan})
@example({"lora_targets": np.array([4, 8])})
@example({"batch_size": HUGE})
@example({"seed": 2**32})
@example({"learning_rate": 5e-324})
@example({"optimizer_in_backward": True, "precision": "fp16", "max_grad_norm": None})
@example({"base": "bf16", "optimizer": "adamw_stochastic", "lora_rank": 4})
@tried
@given(drawn(OF_RECIPE))
def test_a_recipe_is_made_and_comes_back_or_one_sentence_names_a_field(fields):
    recipe = made(Recipe, fields, fields)
    if recipe is not None:
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
        assert all(getattr(recipe, name) == value for name, value in fields.items())


def test_every_field_is_tried():
    assert OF_RECIPE.keys() == {field.name for field in dataclasses.fields(Recipe)}
    assert OF_STEP.keys() == {field.name for field in dataclasses.fields(ModelStep)} - {"config"}


LLM = configured(
    Qwen3Config, 64, 2, 2, 128, 99, num_key_value_heads=2, head_dim=32, max_position_embeddings=64
)
BERT = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=99)
VIT = ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=99)


@tried
@given(drawn(OF_STEP), st.sampled_from([LLM, BERT, VIT]))
def test_a_step_of_any_model_is_made_or_one_sentence_names_a_field(fields, config):
    names = {*fields, "task", config.model_type}  # a model has no such task
    step = made(lambda **given: ModelStep(config, **given), fields, names)
    if step is not None:
        assert dataclasses.replace(step) == step


@tried
@given(st.sampled_from(sorted(NAMED)), st.data())
def test_what_is_near_a_name_is_asked_back(name, more):
    """In other letters, with one letter twice, with other marks between words."""
    meant = more.draw(st.sampled_from([one for one in NAMED[name] if isinstance(one, str)] or [""]))
    place = more.draw(st.integers(0, max(0, len(meant) - 1)))
    doubled = meant[:place] + meant[place : place + 1] + meant[place:]
    typed = more.draw(st.sampled_from([meant.upper(), doubled, meant.replace("-", "_")]))
    fields = {"model": "decoder", "lora_rank": 4, "base": "fp32"} | {name: typed}
    if len(meant) > 3 and typed not in NAMED[name]:
        refused(ValueError, f"Did you mean {meant!r}?", lambda: Recipe(**fields))


@tried
@given(st.sampled_from(sorted(OF_RECIPE)), st.data())
def test_what_is_near_a_field_is_asked_back(name, more):
    place = more.draw(st.integers(0, len(name) - 1))
    typed = name[:place] + name[place] + name[place:]
    refused(ValueError, f"Did you mean {name}?", lambda: Recipe.from_dict({typed: 1}))


EARLY = {"optimizer_in_backward": True, "max_grad_norm": None}
PAIRS = [
    ({"model": "bert"}, "use one of deberta, deberta-large, vit"),
    ({"data": "cifar10"}, "r8, newsgroups"),
    ({"model": "vit", "data": "r8"}, "digits"),
    ({"frozen": 7}, "6 layers"),
    ({"base": "nf4"}, "lora_rank"),
    ({"lora_targets": "all-linear"}, "there are none"),
    ({"base": "bf16", "precision": "fp16"}, "does not mix"),
    ({"optimizer": "adamw_stochastic"}, "base='bf16'"),
    ({"optimizer": "adamw_stochastic", "base": "bf16", "lora_rank": 4}, "without adapters"),
    ({"compile": True, "offload": "activations"}, "one of the two"),
    ({"lora_rank": 4, "float8": "rowwise"}, "leave lora_rank or float8 out"),
    ({"frozen": 1, "float8": "rowwise"}, "leave frozen"),
    ({"precision": "fp16", "float8": "tensorwise"}, "bf16"),
    ({"optimizer_in_backward": True}, "max_grad_norm=None"),
    ({**EARLY, "accumulation": 2}, "accumulation=1"),
    ({**EARLY, "precision": "fp16"}, "overflowed"),
    ({"lora_rank": 129}, "129"),
    ({"accumulation": 3}, "divide"),
    ({"learning_rate": 0}, "learning_rate=0 must be above 0"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1 must be at least 0"),
    ({"lora_rank": 4, "lora_alpha": 0}, "lora_alpha=0 must be above 0"),
    ({"batch_size": 16.0}, "batch_size=16.0 must be a whole number"),
    ({"length": 513}, "512 tokens"),
    ({"model": "decoder-1.7b"}, "profile='full'"),
    ({"data": "digits"}, "reads texts"),
    ({"model": "deberta", "attention": "sdpa"}, "'eager' alone"),
    ({"model": "deberta", "loss": "chunked"}, "language models"),
    ({"model": "vit", "length": 64}, "for text"),
    ({"model": "vit", "padding": "dynamic"}, "for text"),
    *(({"optimizer": name, "offload": "optimizer"}, "made for a GPU")
      for name in ("adamw8bit", "lion8bit", "paged_adamw8bit")),
]  # fmt: skip


@pytest.mark.parametrize("fields, says", PAIRS, ids=[str(fields) for fields, _ in PAIRS])
def test_fields_that_do_not_go_together(fields, says):
    said = refused(WRONG, says, lambda: Recipe(**{"model": "decoder", **fields}))
    assert len(said) < SHORT


OF_ANY = [
    (LLM, {"lora_rank": 65}, "64 columns"),
    (LLM, {"lora_rank": 4, "frozen": 2}, "all layers are frozen"),
    (LLM, {"classes": 3}, "is for a classifier"),
    (BERT, {"classes": 3, "task": "masked-lm"}, "is for a classifier"),
    (BERT, {"loss": "chunked"}, "next token"),
    (VIT, {"length": 16}, "is for text"), (LLM, {"side": 16}, "is for images"),
    (LLM, {"base": "bf16", "weights": "fp32"}, "two dtypes"),
    (LLM, {"weights": "fp16"}, "cannot be trained"), (LLM, {"float8": "mxfp8"}, "tensorwise"),
    (LLM, {"base": "fp16", "lora_rank": 4}, "base='fp16'"),
    (LLM, {"lora_rank": 4, "lora_targets": ""}, "names no layer"),
    (LLM, {"lora_rank": 4, "lora_targets": "q_prj"}, "no linear layer called q_prj"),
    (LLM, {"lora_rank": 4, "lora_targets": ["q_proj"]}, "must be a text"),
    (LLM, {"frozen": 3}, "2 layers"), (LLM, {"length": 65}, "64 tokens"),
]  # fmt: skip


@pytest.mark.parametrize("config, fields, says", OF_ANY, ids=[str(one) for _, one, _ in OF_ANY])
def test_a_step_of_any_model_that_cannot_be(config, fields, says):
    refused(WRONG, says, lambda: plan_model(config, **fields))


# -- layouts as they are written

LAYOUTS = [
    *((text, "is not understood") for text in (
        "fsdp", "8", "=8", ",", "fsdp=8,", "fsdp=8,fsdp=2", "ＦＳＤＰ=8", "megatron=2", "fsdp:8",
        "x" * 9999)),
    *((f"fsdp={number}", "no number of ranks") for number in (
        "", "0", "-2", "1.5", "x", "8 8", "٨", "1e3", "9" * 5000, "+8", "0x8")),
    *((f"hsdp={pair}", "hsdp=2x4") for pair in ("8", "2x", "x4", "2x4x2", "2×4", "-2x4")),
    ("hsdp=0x4", "at least 1"),
    ("fspd=8", "did you mean fsdp"),
    ("zero3=8", "did you mean zero"),
    ("fsdp=8,ddp=2", "choose one of them"),
    ("ddp=2,tp=2", "FSDP2 only"),
    ("pp=2,tp=2", "with data ranks only"),
    ("ep=2", "taken from the data ranks"),
    ("fsdp=2,expert=4", "data=2 cannot be divided by 4"),
    *((f"{strategy}=4,expert=2", "fsdp or zero2 alone") for strategy in ("ddp", "zero1")),
    ("hsdp=2x2,expert=2", "without replicas"),
    *((f"fsdp=4,{axis}=2,expert=2", "context and tensor ranks") for axis in ("tensor", "context")),
    ("pipeline=2,fsdp=2,expert=2", "without pipeline"),
    ("fsdp=999999", "100,000"),
]  # fmt: skip


def test_a_layout_is_written_as_axes():
    for text, says in LAYOUTS:
        refused(ValueError, says, lambda text=text: parse(text))


AXIS = st.sampled_from("ddp zero1 zero2 fsdp hsdp tp tensor pp cp ep expert x".split())


@tried
@given(st.lists(st.tuples(AXIS, st.integers(-1, 9) | st.just("2x4")), max_size=4))
def test_a_layout_is_read_and_written_alike_or_refused(axes):
    text = ",".join(f"{axis}={ranks}" for axis, ranks in axes)
    try:
        layout = parse(text)
    except ValueError as error:
        assert len(one_sentence(str(error))) < SHORT
    else:
        assert parse(str(layout)) == layout


# -- data of a fine-tune

SHORT_RUN = Recipe(model="vit", steps=1, batch_size=4, train_size=8, test_size=10)


def fit(**more):
    return train.fit(**{"recipe": SHORT_RUN, "device": "cpu", "progress": False, **more})


def split(**columns):
    return data.Encoded(
        {"pixel_values": torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "labels": torch.arange(4)}
        | columns,
        torch.ones(4, dtype=torch.int64),
        data.Pixels(8),
    )


TEXT = {"input_ids": torch.ones(4, 8, dtype=torch.int64), "labels": torch.arange(4)}
EMPTY = data.Encoded({"pixel_values": torch.zeros(0, 3, 8, 8)}, torch.ones(0))
TOO_LARGE = split(labels=torch.tensor([0, 1, 2, 10]))
SPLITS = {
    "a list": ([], "of type Encoded"),
    "a path": ("train.jsonl", "of type Encoded"),
    "text for images": (data.Encoded(TEXT, torch.ones(4)), "none of images"),
    "no examples": (EMPTY, "These 0"),
    "no columns": (data.Encoded({}, torch.ones(4)), "none of images with labels"),
    "a label too large": (TOO_LARGE, "labels from 0 to 10"),
    "a label below 0": (split(labels=torch.tensor([0, 1, 2, -100])), "labels from -100 to 2"),
    "too few labels": (split(labels=torch.arange(3)), "columns of 3 and 4 examples"),
    "too few images": (split(pixel_values=torch.zeros(2, 3, 8, 8)), "columns of 2 and 4 examples"),
}


@pytest.mark.parametrize("value, words", SPLITS.values(), ids=SPLITS)
def test_data_that_the_model_cannot_take_is_said_before_it_is_made(value, words, monkeypatch):
    monkeypatch.setattr(train.models, "build", None)
    refused(WRONG, words, lambda: fit(train=value))


@pytest.mark.parametrize("model, beyond", [("deberta", -1), ("deberta", 2**40), ("decoder", 0)])
def test_a_token_that_the_model_does_not_know_is_one_sentence(model, beyond):
    recipe = Recipe(model, batch_size=4, steps=1, length=64, train_size=8)
    examples = train.encoded(recipe)["train"]
    words = models.build(recipe).get_input_embeddings().num_embeddings
    ids = examples.columns["input_ids"].clone()
    ids[1, 0] = words + beyond if beyond >= 0 else beyond
    wrong = replace(examples, columns=examples.columns | {"input_ids": ids})
    refused(ValueError, f"from 0 to {words - 1}", lambda: fit(recipe=recipe, train=wrong))


def test_evaluation_takes_the_recipe_s_data():
    for value in (TOO_LARGE, EMPTY):
        refused(
            ValueError,
            "examples",
            lambda value=value: train.evaluate(torch.nn.Linear(1, 1), value, SHORT_RUN),
        )


# -- what a plan shows may be changed, and the next plan is not


def test_a_plan_that_is_changed_changes_no_other():
    def facts(planned):
        return dict(planned.flops), [*planned.largest_tensors], dict(planned.at_peak), planned.peak

    kept, made = facts(plan(SHORT_RUN)), plan(SHORT_RUN)
    made.flops.clear()
    made.at_peak.clear()
    made.largest_tensors.append((1, "x", "y"))
    for array in (made.timeline, made.phases):
        with pytest.raises(ValueError, match="read-only"):
            array.fill(0)
    assert facts(plan(SHORT_RUN)) == kept

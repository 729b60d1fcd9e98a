"""Recipes, fit and run: values of wrong types, out of bounds, and numbers far too large."""

import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from helpers import data, models, record, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.attack import refused

HUGE = 10**400
ENDLESS = 10**5000  # longer than Python is willing to write
NONE_TAKEN = ("train_size", "test_size", "length", "frozen", "lora_rank")
WHOLE = ("batch_size", "accumulation", "steps", "seed", *NONE_TAKEN)
REAL = ("learning_rate", "weight_decay", "warmup", "max_grad_norm")
NAMES = ("model", "profile", "weights", "data", "padding", "precision", "optimizer")
CASES = [
    *((name, value) for name in WHOLE for value in (-1, 2**64, HUGE, ENDLESS, -HUGE)),
    *((name, value) for name in WHOLE for value in (1.5, "4", math.nan, True, [4], 4j)),
    *((name, value) for name in REAL for value in (math.nan, math.inf, -math.inf, -1.0, HUGE)),
    *((name, value) for name in REAL for value in (ENDLESS, "0.1", True, [0.1], 1j, Decimal(1))),
    *((name, Fraction(1, 2)) for name in ("weight_decay", "batch_size")),
    *((name, value) for name in NAMES for value in ("no such", "", 3, True, b"vit", ["vit"])),
    *((name, "x" * 100_000) for name in NAMES),
    *(("checkpointing", value) for value in (1, 0, "yes", None, [])),
    ("seed", 2**32),
    ("seed", 2**32 + 5),
    ("seed", np.int64(2**40)),
    ("steps", 0),
    ("batch_size", 0),
    ("accumulation", 3),
    ("length", 2),
    ("length", 513),
    ("warmup", 1.01),
    ("max_grad_norm", 0.0),
    ("learning_rate", 0.0),
    ("batch_size", np.array([4, 8])),
    ("batch_size", torch.tensor([4, 8])),
    ("learning_rate", np.float32("nan")),
    ("learning_rate", 1e-300),
    ("learning_rate", 5e-324),
    ("learning_rate", 2.0**-127),
]


def short(value):
    """A name for a case: pytest's own would write numbers out."""
    if isinstance(value, int) and abs(value) > 2**70:
        return "endless" if abs(value) > HUGE else "huge"
    return re.sub(r"\W+", "_", repr(value)[:20])


@pytest.mark.parametrize("name, value", CASES, ids=short)
def test_a_field_that_makes_no_fine_tune_is_one_sentence(name, value):
    said = refused((ValueError, TypeError), name, lambda: Recipe(**{name: value}))
    assert len(said) < 300


@pytest.mark.parametrize("name", ["mdoel", "lr", "", "__class__"])
def test_an_unknown_field_is_one_sentence(name):
    refused(ValueError, "no field", lambda: Recipe.from_dict({name: 1}))


@pytest.mark.parametrize("values", [None, [], "vit", 3])
def test_what_is_no_recipe_in_json_is_one_sentence(values):
    refused(TypeError, "recipe", lambda: Recipe.from_dict(values))


# -- fit and run

SHORT = Recipe(model="vit", steps=1, batch_size=4, train_size=8, test_size=10)


@pytest.fixture
def no_model(monkeypatch):
    """What is wrong must be said before a model is made."""

    def build(*_, **__):
        raise AssertionError("a model was made")

    monkeypatch.setattr(train.models, "build", build)


def fit(**more):
    return train.fit(**{"recipe": SHORT, "device": "cpu", "progress": False, **more})


DEVICES = [
    "gpu",
    "GPU",
    "",
    "cuda:x",
    "cpu:x",
    "cuda:99",
    "cuda:-1",
    "meta",
    "tpu",
    "xla",
    " ",
    "c" * 999,
]
WITHOUT = [] if torch.cuda.is_available() else ["cuda", "cuda:0", torch.device("cuda")]


@pytest.mark.parametrize("device", [*DEVICES, *WITHOUT], ids=lambda device: f"{device}"[:9])
@pytest.mark.parametrize(
    "call", [fit, lambda device: record.run(SHORT, device=device)], ids=["fit", "run"]
)
def test_a_device_that_is_not_here_is_one_sentence(device, call, no_model):
    refused(ValueError, ["device=", "'cpu'"], lambda: call(device=device))


@pytest.mark.parametrize("device", [0, 1.5, True, ["cpu"], b"cpu"])
def test_a_device_that_is_no_name_is_one_sentence(device, no_model):
    refused(TypeError, "device=", lambda: fit(device=device))


@pytest.mark.parametrize(
    "value", [0, -1, 2**40, HUGE, ENDLESS, 1.5, "20", True, None, math.nan], ids=short
)
def test_saving_every_so_many_steps_takes_a_whole_number(value, no_model):
    refused((ValueError, TypeError), "save_every", lambda: fit(save_every=value))


@pytest.mark.parametrize("value", [None, "vit", {}, 3, Recipe])
def test_what_is_no_recipe_is_one_sentence(value, no_model):
    refused(TypeError, "recipe must be of type Recipe", lambda: fit(recipe=value))
    refused(TypeError, "recipe must be of type Recipe", lambda: record.run(value))


@pytest.mark.parametrize("value", ["adamw", 3, {}, None])
def test_an_optimizer_is_made_by_a_function(value, no_model):
    refused(TypeError, "optimizer", lambda: fit(optimizer=value))


@pytest.mark.parametrize("value", [None, "adamw", 3])
def test_the_function_must_make_an_optimizer(value):
    refused(
        TypeError, "optimizer must be of type Optimizer", lambda: fit(optimizer=lambda *_: value)
    )


def split(**columns):
    return data.Encoded(
        {"pixel_values": torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "labels": torch.arange(4)}
        | columns,
        torch.ones(4, dtype=torch.int64),
        data.Pixels(8),
    )


TEXT = {"input_ids": torch.ones(4, 8, dtype=torch.int64), "labels": torch.arange(4)}
SPLITS = {
    "a list": ([], "of type Encoded"),
    "a path": ("train.jsonl", "of type Encoded"),
    "a dict": ({}, "of type Encoded"),
    "text for images": (data.Encoded(TEXT, torch.ones(4)), "none of images"),
    "no examples": (
        data.Encoded({"pixel_values": torch.zeros(0, 3, 8, 8)}, torch.ones(0)),
        "These 0",
    ),
    "no columns": (data.Encoded({}, torch.ones(4)), "none of images with labels"),
    "a label too large": (split(labels=torch.tensor([0, 1, 2, 10])), "labels from 0 to 10"),
    "a label below 0": (split(labels=torch.tensor([0, 1, 2, -100])), "labels from -100 to 2"),
    "too few labels": (split(labels=torch.arange(3)), "columns of 3 and 4 examples"),
    "too few images": (split(pixel_values=torch.zeros(2, 3, 8, 8)), "columns of 2 and 4 examples"),
}


@pytest.mark.parametrize("value, words", SPLITS.values(), ids=SPLITS)
def test_data_that_the_model_cannot_take_is_one_sentence(value, words, no_model):
    refused((ValueError, TypeError), words, lambda: fit(train=value))


@pytest.mark.parametrize(
    "model, beyond", [("deberta", -1), ("deberta", 0), ("deberta", 2**40), ("decoder", 0)]
)
def test_a_token_that_the_model_does_not_know_is_one_sentence(model, beyond):
    recipe = Recipe(model, batch_size=4, steps=1, length=64)
    examples = train.encoded(recipe)["train"]
    words = models.build(recipe).get_input_embeddings().num_embeddings
    ids = examples.columns["input_ids"].clone()
    ids[1, 0] = words + beyond if beyond >= 0 else beyond
    wrong = replace(examples, columns=examples.columns | {"input_ids": ids})
    refused(ValueError, f"from 0 to {words - 1}", lambda: fit(recipe=recipe, train=wrong))


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, HUGE], ids=short)
def test_evaluation_takes_a_whole_batch(value):
    refused(
        (ValueError, TypeError),
        "batch_size",
        lambda: train.evaluate(torch.nn.Linear(1, 1), train.encoded(SHORT)["test"], SHORT, value),
    )


@pytest.mark.parametrize("size", [0, -1, 6_000, HUGE, 1.5, "8", True], ids=short)
@pytest.mark.parametrize("name", ["train_size", "test_size"])
def test_a_split_that_is_not_there_is_one_sentence(name, size):
    refused((ValueError, TypeError), name, lambda: data.load("digits", **{name: size}))


@pytest.mark.parametrize("seed", [-1, 2**32, HUGE, 1.5, "0", None, True], ids=short)
def test_a_seed_of_the_choice_that_cannot_be_is_one_sentence(seed):
    refused((ValueError, TypeError), "seed", lambda: data.load("digits", 100, seed=seed))


@pytest.mark.parametrize(
    "value", [split(labels=torch.tensor([0, 1, 2, 10])), SPLITS["no examples"][0]]
)
def test_evaluation_takes_the_recipe_s_data(value):
    refused(ValueError, "examples", lambda: train.evaluate(torch.nn.Linear(1, 1), value, SHORT))


@pytest.mark.parametrize("name", ["", "imdb", None, 3, ["r8"]])
def test_an_unknown_data_set_is_one_sentence(name):
    refused((ValueError, TypeError), "data set", lambda: data.load(name))


def test_more_examples_than_there_are_is_one_sentence():
    refused(ValueError, "train_size", lambda: fit(recipe=replace(SHORT, train_size=5_000)))


@pytest.mark.parametrize("device", ["gpu", "", None, 3, "cuda:0", HUGE], ids=short)
def test_a_plan_for_an_unknown_device_is_one_sentence(device):
    refused((ValueError, TypeError), "cuda", lambda: plan(SHORT, device))

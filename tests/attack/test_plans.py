"""Plans, GPUs and layouts: what is no recipe, no plan, no GPU, no link, no layout."""

import math
import re

import numpy as np
import pytest
import torch
from transformers import BertConfig

from helpers.plan import ladder, plan, plan_at
from helpers.recipe import Recipe
from helpers.show import phases, plans
from tests.attack import refused
from tight_fit.gpus import GPU, GPUS, as_gpu, device, find, matches, specs
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.seconds import Link, find_link, rate
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.search.layouts import search_layouts

RECIPE = Recipe(model="vit", batch_size=4)
STEP = ModelStep(BertConfig(num_hidden_layers=1))
WRONG = (ValueError, TypeError)
HUGE = 10**5000
# What is no number and no name of anything; text that is far too long; numbers that are none.
THINGS = (
    None,
    "",
    "no such",
    3,
    -1,
    1.5,
    math.nan,
    HUGE,
    True,
    [],
    [1],
    {},
    b"x",
    object,
    "x" * 9999,
)
NUMBERS = (None, "", "4", math.nan, math.inf, -math.inf, HUGE, -HUGE, True, [], [1], {}, 1j, object)


def short(value):
    """A name for a case: pytest's own would write numbers and texts out."""
    if isinstance(value, int) and abs(value) > 2**70:
        return "huge"
    return re.sub(r"\W+", "_", repr(value)[:20])


@pytest.fixture(scope="module")
def planned():
    return plan(RECIPE)


# -- plans


@pytest.mark.parametrize("thing", [*THINGS, Recipe, GPUS["T4"]], ids=short)
def test_only_a_recipe_is_planned(thing):
    refused(TypeError, "recipe must be of type Recipe", lambda: plan(thing))


@pytest.mark.parametrize(
    "thing", [*THINGS, "gpu", "CUDA", "cuda:0", torch.device("cpu")], ids=short
)
def test_a_plan_is_for_cuda_or_cpu(thing):
    refused(ValueError, ["device=", "cuda or cpu"], lambda: plan(RECIPE, thing))


@pytest.mark.parametrize(
    "thing", [thing for thing in THINGS if thing not in (None, object)], ids=short
)
def test_a_change_of_the_model_is_a_function(thing):
    refused(TypeError, "change", lambda: plan(RECIPE, change=thing))


@pytest.mark.parametrize("thing", [*THINGS, RECIPE], ids=short)
def test_only_a_plan_is_known_at_other_shapes(thing):
    refused(TypeError, "plan must be of type Plan", lambda: plan_at(thing))


@pytest.mark.parametrize("size", [0, -1, 1.5, "4", HUGE, True, [4]], ids=short)
def test_another_shape_is_one_that_a_recipe_may_have(size, planned):
    refused(WRONG, "batch_size", lambda: plan_at(planned, batch_size=size))


@pytest.mark.parametrize("thing", THINGS, ids=short)
def test_a_plan_fits_gpus_only(thing, planned):
    refused(WRONG, "gpu=", lambda: planned.fits(thing))


@pytest.mark.parametrize("thing", THINGS, ids=short)
def test_a_plan_has_seconds_on_gpus_only(thing, planned):
    refused(WRONG, "gpu=", lambda: planned.seconds(thing))


@pytest.mark.parametrize("thing", THINGS, ids=short)
@pytest.mark.parametrize("shows", [plans, lambda named: phases(named, "T4")])
def test_a_table_of_plans_takes_recipes_and_plans(shows, thing):
    refused(WRONG, "named", lambda: shows(thing))
    refused(WRONG, "named", lambda: shows({"a label": thing}))


# -- GPUs


@pytest.mark.parametrize(
    "thing", [*THINGS, "4", "16", "0GB", "-8GB", "1e9GB", "T5", "A1000"], ids=short
)
def test_a_gpu_has_a_name_or_a_size(thing):
    refused(ValueError, "gpu=", lambda: find(thing))


@pytest.mark.parametrize("number, meant", [("8", "8GB"), ("16", "16GB"), ("24", "24GB")])
def test_a_bare_number_is_asked_back(number, meant):
    assert not matches(number)
    refused(ValueError, f"did you mean {meant}", lambda: find(number))


@pytest.mark.parametrize("memory", [*NUMBERS, 0, -1, 1.5, 1024], ids=short)
def test_a_gpu_of_ones_own_has_memory(memory):
    refused(WRONG, "memory", lambda: as_gpu(GPU("mine", memory, (8, 6))))


@pytest.mark.parametrize(
    "capability", [*NUMBERS, 8, 8.6, "8.6", (8,), (8.0, 6), ("8", "6")], ids=short
)
def test_a_gpu_of_ones_own_has_a_capability(capability):
    refused(TypeError, "capability", lambda: as_gpu(GPU("mine", 2**33, capability)))


FIGURES = {"sms": 40, "lanes": 64, "clock": 1.5e9, "bandwidth": 3e11, "l2": 2**22}
IN_OTHER_UNITS = [("clock", 1.5), ("clock", 1500), ("bandwidth", 320), ("l2", 4), ("fp16", 65)]
CASES = [(name, value) for name in (*FIGURES, "tf32", "fp16", "bf16") for value in (*NUMBERS, -1)]


@pytest.mark.parametrize(
    "name, value", [*CASES, *IN_OTHER_UNITS, ("sms", 1.5), ("sms", 0)], ids=short
)
def test_a_described_gpu_has_figures_in_their_units(name, value):
    refused(WRONG, f"{name}=", lambda: specs.described(**{"name": "mine", **FIGURES, name: value}))


@pytest.mark.parametrize("like", THINGS, ids=short)
def test_a_described_gpu_is_like_one_that_was_measured(like):
    refused(ValueError, "like=", lambda: specs.described("mine", **FIGURES, like=like))


@pytest.mark.parametrize("precision", [*THINGS, "FP16", "fp8", "int4"], ids=short)
def test_an_arithmetic_has_a_name(precision):
    refused(ValueError, "precision", lambda: specs.has_arithmetic(precision, "T4"))
    refused(ValueError, "precision", lambda: rate("T4", precision))


@pytest.mark.parametrize("thing", [thing for thing in THINGS if thing is not None], ids=short)
def test_a_device_has_a_name(thing):
    refused(WRONG, "device=", lambda: device(thing))


# -- layouts


@pytest.mark.parametrize("field", ["data", "pipeline", "tensor", "context", "replicate"])
@pytest.mark.parametrize("value", [*NUMBERS, -1, 1.5, 2**40], ids=short)
def test_a_layout_has_whole_numbers_of_ranks(field, value):
    refused(WRONG, field, lambda: Layout(**{field: value}))


@pytest.mark.parametrize("field", ["per_machine", "machines", "cards"])
@pytest.mark.parametrize("value", [*NUMBERS, 0, -1, 1.5], ids=short)
def test_a_cluster_has_whole_numbers_of_things(field, value):
    refused(WRONG, field, lambda: Cluster("T4", **{field: value}))


@pytest.mark.parametrize("field", ["gpu", "inside", "between"])
@pytest.mark.parametrize("thing", THINGS, ids=short)
def test_a_cluster_has_gpus_and_links(field, thing):
    refused(WRONG, field if field == "gpu" else [], lambda: Cluster(**{"gpu": "T4", field: thing}))


@pytest.mark.parametrize("value", [*NUMBERS, -1], ids=short)
def test_a_link_has_a_speed_and_a_latency(value):
    refused(WRONG, "speed", lambda: Link("mine", value, 1e-6))
    refused(WRONG, "latency", lambda: Link("mine", 1e9, value))


@pytest.mark.parametrize("links", [*THINGS, {"tensor": "NVLink 3"}], ids=short)
def test_every_axis_has_a_link(links):
    refused(WRONG, [], lambda: find_link(links, "data"))


@pytest.mark.parametrize("thing", THINGS, ids=short)
def test_a_search_is_for_a_step_on_a_cluster(thing):
    refused(TypeError, "job", lambda: search_layouts(thing, Cluster("T4")))
    refused(TypeError, "cluster", lambda: search_layouts(STEP, thing))


@pytest.mark.parametrize("thing", THINGS, ids=short)
@pytest.mark.parametrize("call", [ladder.climb, ladder.top, ladder.without, ladder.alone])
def test_a_ladder_begins_with_a_recipe(call, thing):
    refused(TypeError, "start", lambda: call(thing))


@pytest.mark.parametrize("steps", [thing for thing in THINGS if thing is not None], ids=short)
def test_rungs_are_changes_by_name(steps):
    refused(WRONG, "steps", lambda: ladder.climb(RECIPE, steps))
    if steps != {}:  # as the first rung, which changes nothing
        refused(WRONG, "steps", lambda: ladder.climb(RECIPE, {"rung": steps}))


@pytest.mark.parametrize("factor", [*NUMBERS, 0, -1], ids=short)
def test_a_learning_rate_is_multiplied_by_a_number(factor):
    refused(WRONG, "factor", lambda: ladder.own_rate(RECIPE, factor))


# -- any model, any step

CONFIG = BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99
)
FIELDS = ("batch_size", "accumulation", "length", "frozen", "lora_rank", "classes", "side")
NO_NUMBER = ("", "4", math.nan, math.inf, HUGE, True, [], {}, 1.5, -1, np.array([1, 2]))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", NO_NUMBER, ids=short)
def test_a_step_of_any_model_takes_whole_numbers(field, value):
    refused(WRONG, field, lambda: plan_model(CONFIG, **{field: value}))


@pytest.mark.parametrize("field", ["precision", "optimizer", "task", "weights"])
@pytest.mark.parametrize("value", ["", "no such", 3, True, [], {}, b"fp32", "x" * 9999], ids=short)
def test_a_step_of_any_model_takes_known_names(field, value):
    refused(WRONG, field, lambda: plan_model(CONFIG, **{field: value}))


@pytest.mark.parametrize(
    "source", [None, 3, 1.5, [], {}, True, "x" * 9999, "~nosuchuser/x"], ids=short
)
def test_a_model_has_a_name_or_a_configuration(source):
    refused((*WRONG, OSError, RuntimeError), [], lambda: plan_model(source))


def setup():
    layer = torch.nn.Linear(4, 4)
    return [layer], lambda: layer(torch.zeros(2, 4)).sum().backward()


@pytest.mark.parametrize("field", ["steps", "ranks"])
@pytest.mark.parametrize("value", [*NUMBERS[1:], 0, -1, 1.5], ids=short)
def test_a_step_of_ones_own_is_run_a_whole_number_of_times(field, value):
    refused(WRONG, field, lambda: plan_custom_step(setup, **{field: value}))


@pytest.mark.parametrize(
    "version", ["", "no such", 3, 2.0, True, [], "1.4", "99.0", "x" * 99], ids=short
)
def test_a_release_of_pytorch_is_one_that_is_known(version):
    refused(WRONG, "torch_version", lambda: plan_custom_step(setup, torch_version=version))


@pytest.mark.parametrize("thing", [thing for thing in THINGS if thing is not object], ids=short)
def test_a_step_of_ones_own_is_set_up_by_a_function(thing):
    refused(TypeError, "setup", lambda: plan_custom_step(thing))
    refused(TypeError, "setup must return two things", lambda: plan_custom_step(lambda: thing))

"""Arguments in Python: of every function that a reader calls, values that are none of its kind."""

import math
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from transformers import BertConfig, Qwen3Config, ViTConfig

from by_hand import packing, padding
from helpers import batching, data, ladder, plots, record, sets, show, tables, train
from helpers.parallel import launch
from helpers.plan import plan, plan_at
from helpers.recipe import Recipe, difference
from helpers.show import phases, plans
from tests.attack import refused
from tests.attack.wrong import HUGE, NO_COUNT, NO_NUMBER, NO_WHOLE, WRONG, Entry, refuses_all
from tests.small import configured
from tight_fit.gpus import GPU, GPUS, as_gpu, device, find, specs
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.plan import plan_layout
from tight_fit.layouts.seconds import Link, find_link
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model
from tight_fit.plans.own_step import plan_custom_step
from tight_fit.search.layouts import search_layouts

SMALL = Recipe(model="vit", steps=1, batch_size=4, train_size=8, test_size=10)
PLANNED = cache(lambda: plan(SMALL))  # nothing is planned while tests are collected
BERT = configured(BertConfig, 32, 2, 2, 64, 99)
VIT = configured(ViTConfig, 32, 2, 2, 64, 99)
LLM = configured(Qwen3Config, 64, 2, 2, 128, 99, num_key_value_heads=2, head_dim=32)
NOT_NEGATIVE = (*NO_NUMBER, "below 0")
POSITIVE = (*NOT_NEGATIVE, "0")
ONE_OR_MORE = NO_COUNT[:-2]  # without the values that are too large
FIGURES = {"sms": 40, "lanes": 64, "clock": 1.5e9, "bandwidth": 3e11, "l2": 2**22}
LORA = {"lora_rank": 4}
OPTIONAL = ("train_size", "test_size", "length", "frozen", "lora_rank", "lora_alpha", "side",
            "classes", "learning_rate", "max_grad_norm", "data", "attention", "offload", "float8",
            "task")  # fmt: skip
NAMES = ("precision", "optimizer", "attention", "lora_scale", "loss", "offload", "float8")
FLAGS = ("checkpointing", "compile", "optimizer_in_backward")


def fit(**more):
    return train.fit(**{"recipe": SMALL, "device": "cpu", "progress": False, **more})


def setup():
    layer = torch.nn.Linear(4, 4)
    return [layer], lambda: layer(torch.zeros(2, 4)).sum().backward()


def of(call, name, /, kinds=("thing",), more=(), but=(), **fixed):
    """The entry for a keyword of a call, whose name the sentence says."""
    return Entry(name, lambda value: call(**fixed, **{name: value}), kinds, more, but)


def each(call, names, /, kinds=("thing",), more=(), **fixed):
    """Such entries of several keywords; those of OPTIONAL may be None."""
    return {f"{call.__name__} {name}": of(call, name, kinds, more,
                                          (None,) if name in OPTIONAL else (), **fixed)
            for name in names}  # fmt: skip


def model_step(**fields):
    return ModelStep(LLM, **({} if "lora_rank" in fields else LORA), **fields)


def recipe(**fields):
    return Recipe("decoder", **({} if "lora_rank" in fields else LORA), **fields)


LENGTHS = (
    None, "", "abc", 3, 1.5, [], [0], [-1], [1.5], ["4"], [True], {}, {1: 2}, object, {3, 4, 5},
    frozenset((3, 4)), {3: 1, 4: 1}.keys(), {3: 1}.values(), bytearray(b"345"), np.array(3),
    torch.tensor(3), np.array([True, True]), np.ones((2, 2), int), np.array([3.5, 4.0]),
    np.array([-(2**63)]), torch.tensor([]),
)  # fmt: skip
LISTED = (None, 3, "ab", [3], [[0.5]], [["a"]], {}, object)  # no batches of examples
DRAWN = (None, "", "4", [], math.nan, math.inf, HUGE, object)  # no values of bars
ENTRIES = {
    **each(recipe, ("batch_size", "accumulation", "steps", "train_size", "test_size", "length",
                    "lora_rank"), NO_COUNT, (HUGE,)),
    **each(recipe, ("frozen",), NO_WHOLE),
    **each(recipe, ("seed",), NO_WHOLE, (2**32, 2**32 + 5)),
    **each(recipe, ("learning_rate", "weight_decay", "warmup", "max_grad_norm"), NOT_NEGATIVE),
    **each(recipe, ("lora_alpha",), POSITIVE),
    **each(recipe, (*NAMES, "profile", "weights", "data", "padding", "lora_targets",
                    "base")),
    "Recipe model": of(Recipe, "model"),
    **each(recipe, FLAGS, ("no flag",)),
    "Recipe's floats": Entry("", lambda pair: Recipe(**{pair[0]: pair[1]}), (), (
        ("warmup", 1.01), ("max_grad_norm", 0.0), ("learning_rate", 0.0), ("learning_rate", 1e-300),
        ("learning_rate", 5e-324), ("learning_rate", 2.0**-127))),
    "a recipe in JSON": Entry("recipe", Recipe.from_dict, ("thing",), (), ({},)),
    "an unknown field": Entry("no field", lambda name: Recipe.from_dict({name: 1}), (),
                              ("mdoel", "lr", "", "__class__")),
    "difference": Entry("of type Recipe", lambda value: difference(SMALL, value)),
    # fit, run and their data
    **{f"device of {name}": Entry(["device=", "'cpu'"], call, (), (
        "gpu", "", "cuda:x", "cpu:x", "cuda:99", "cuda:-1", "meta", "tpu", " ", "c" * 999))
       for name, call in {"fit": lambda value: fit(device=value),
                          "run": lambda value: record.run(SMALL, device=value)}.items()},
    "a device that is no name": of(fit, "device", (), (0, 1.5, True, ["cpu"], b"cpu")),
    "save_every": of(fit, "save_every", NO_COUNT),
    "fit recipe": Entry("recipe must be of type Recipe", lambda value: fit(recipe=value),
                        more=(Recipe,)),
    "run recipe": Entry("recipe must be of type Recipe", record.run, more=(Recipe,)),
    "an optimizer": of(fit, "optimizer", but=(object,)),
    "what makes one": Entry("optimizer must be of type Optimizer",
                            lambda value: fit(optimizer=lambda *_: value), (), (None, "adamw", 3)),
    "evaluate": Entry("batch_size", lambda value: train.evaluate(
        torch.nn.Linear(1, 1), train.encoded(SMALL)["test"], SMALL, value), NO_COUNT),
    **each(data.load, ("train_size", "test_size"), NO_COUNT, (6_000,), name="digits"),
    "a seed of a choice": of(data.load, "seed", NO_WHOLE, (2**32,), name="digits", train_size=100),
    "a data set": Entry("data set", data.load),
    "a run's name": Entry("is no name for a run", lambda value: record.run(SMALL, value),
                          ("thing",), ("../a/b", "a/b/c", "a b/c", "a/", "/b", "a/b\n"), (None,)),
    # plans
    "plan": Entry("recipe must be of type Recipe", plan, more=(Recipe, GPUS["T4"])),
    "plan device": Entry(["device=", "cuda"], lambda value: plan(SMALL, value),
                         more=("gpu", "CUDA", "cuda:0", torch.device("cpu"))),
    "plan change": Entry("change", lambda value: plan(SMALL, change=value), but=(None, object)),
    "plan_at": Entry("plan must be of type Plan", plan_at, more=(SMALL,)),
    "another batch": Entry("batch_size", lambda value: plan_at(PLANNED(), batch_size=value),
                           NO_COUNT, (), (None,)),
    "fits": Entry("gpu=", lambda value: PLANNED().fits(value)),
    "seconds": Entry("gpu=", lambda value: PLANNED().seconds(value)),
    **{f"{name} of {what}": Entry("named", lambda value, c=call, w=wrap: c(w(value)),
                                  but=({},) if what == "one" else ())
       for name, call in (("plans", plans), ("phases", lambda named: phases(named, "T4")),
                          ("tables.runs", tables.runs), ("tables.plans", tables.plans))
       for what, wrap in (("all", lambda value: value), ("one", lambda value: {"label": value}))},
    "before_after": Entry("before", lambda value: tables.before_after(value, value)),
    "before_and_after": Entry("runs", lambda value: show.before_and_after(value, value)),
    "losses": Entry("named", plots.losses),
    "losses of one": Entry("named", lambda value: plots.losses({"label": value}), (),
                           (None, "", "no", 3, True, [], {}, b"x", object)),
    "smooth": Entry("smooth", lambda value: plots.losses({"label": [1.0, 2.0]}, value), NO_COUNT),
    "bars": Entry("values", lambda value: plots.bars(value, "label"), (), DRAWN),
    "bars of one": Entry("values", lambda value: plots.bars({"name": value}, "label"), (),
                         (*DRAWN, ["4"], [None])),
    "categories": Entry("plans", plots.categories),
    "timeline": Entry("plans", plots.timeline),
    "a line": Entry("gpu", lambda value: plots.categories({"label": PLANNED()}, gpu=value),
                    but=(None,)),
    "capacity": Entry("capacity", lambda value: plots.timeline(PLANNED(), capacity=value), (),
                      ("", "no such", -1, 1.5, HUGE, True, [], {}, b"x", object)),
    # GPUs
    "find": Entry("gpu=", find, more=("4", "0GB", "-8GB", "1e9GB", "T5", "A1000")),
    "a number alone": Entry("did you mean 16GB", find, (), ("16",)),
    "memory": Entry("memory", lambda value: as_gpu(GPU("mine", value, (8, 6))), ONE_OR_MORE,
                    (0, 1024)),
    "a capability": Entry("capability", lambda value: as_gpu(GPU("mine", 2**33, value)),
                          more=(8, 8.6, "8.6", (8,), (8.0, 6), ("8", "6"), (8, 6, 1), (),
                                (True, False))),
    "a capability that is none": Entry("", lambda value: as_gpu(GPU("mine", 2**33, value)), (), (
        (-8, 6), (8, -6), (99, 0), (8, 10), (10**30, 0))),
    "a GPU's name": Entry("", lambda value: as_gpu(GPU(value, 2**33, (8, 6))), (), (
        None, 3, "", " ", "a\nb", b"T4")),
    **{f"described {name}": Entry(f"{name}=", lambda value, name=name: specs.described(
        **{"name": "mine", **FIGURES, name: value}), NOT_NEGATIVE,
        {"clock": (1.5, 1500), "bandwidth": (320,), "l2": (4,), "fp16": (65,), "sms": (1.5, 0)}
        .get(name, ()), (None,) if name in ("tf32", "fp16", "bf16") else ())
       for name in (*FIGURES, "tf32", "fp16", "bf16")},
    "described like": of(specs.described, "like", name="mine", **FIGURES),
    "arithmetic": Entry("precision", lambda value: specs.has_arithmetic(value, "T4"),
                        more=("FP16", "fp8", "int4")),
    "device": Entry("device=", device, but=(None,)),
    # layouts and searches
    **each(Layout, ("data", "pipeline", "tensor", "context", "replicate"), NO_COUNT,
           (10**9, 10**30)),
    **each(Layout, ("reshard", "reshard_root"), ("no flag",), data=2),
    "a layout's text": Entry("layout", parse),
    **each(Cluster, ("per_machine", "machines", "cards"), ONE_OR_MORE, (0, -1), gpu="T4"),
    "Cluster gpu": Entry("gpu", Cluster),
    **{f"Cluster {name}": Entry("", lambda value, name=name: Cluster("T4", **{name: value}))
       for name in ("inside", "between")},
    "Link speed": Entry("speed", lambda value: Link("mine", value, 1e-6), NOT_NEGATIVE),
    "Link latency": Entry("latency", lambda value: Link("mine", 1e9, value), NOT_NEGATIVE),
    "find_link": Entry("", lambda value: find_link(value, "data"), more=({"tensor": "NVLink 3"},)),
    "search job": Entry("job", lambda value: search_layouts(value, Cluster("T4"))),
    "search cluster": Entry("cluster", lambda value: search_layouts(ModelStep(BERT), value)),
    "planned layout": Entry("layout", lambda value: plan_layout(BERT, value)),
    "planned reduce": Entry("reduce", lambda value: plan_layout(BERT, Layout(2), reduce=value),
                            more=("fp16", "BF16")),
    **{f"planned {name}": Entry(name, lambda value, name=name: plan_layout(
        BERT, Layout(2), **{name: value}), ("no flag",)) for name in ("selective", "all_layers")},
    **{f"ladder {call.__name__}": Entry("start", call)
       for call in (ladder.climb, ladder.top, ladder.without, ladder.alone)},
    "rungs": Entry("steps", lambda value: ladder.climb(SMALL, value), but=(None,)),
    "a rung": Entry("", lambda value: ladder.climb(SMALL, {"rung": value}), ("thing",),
                    ({"batchsize": 1},), ({},)),
    "factor": Entry("factor", lambda value: ladder.own_rate(SMALL, value), POSITIVE),
    # steps of any model, and of one's own
    **each(model_step, ("batch_size", "accumulation", "length", "frozen", "lora_rank"),
           NO_WHOLE[:-1], (HUGE,)),
    # Of models that take them: others refuse any value.
    "ModelStep classes": of(ModelStep, "classes", (*NO_WHOLE[:-1], "0"), (HUGE,), (None,),
                            config=BERT, task="sequence-classification"),
    "ModelStep side": of(ModelStep, "side", (*NO_WHOLE[:-1], "0"), (HUGE,), (None,), config=VIT),
    **each(model_step, (*NAMES, "task")),
    "ModelStep weights": of(model_step, "weights", but=(None,)),
    "ModelStep base": of(model_step, "base", but=(None,)),
    **each(model_step, ("kbit", *FLAGS), ("no flag",)),
    **each(model_step, ("lora_alpha",), POSITIVE),
    **{f"own step {name}": of(plan_custom_step, name, ONE_OR_MORE, (0,), (None,), setup=setup)
       for name in ("steps", "ranks")},
    "a release": of(plan_custom_step, "torch_version", more=("1.4", "99.0"), but=(None,),
                    setup=setup),
    "setup": Entry("setup", plan_custom_step, but=(object,)),
    "what is set up": Entry("setup must return two things",
                            lambda value: plan_custom_step(lambda: value)),
    # batches and ranks
    **{f"lengths of {name}": Entry("", call, (), LENGTHS) for name, call in {
        "length_sorted": lambda value: batching.length_sorted(value, 2),
        "bucketed": lambda value: batching.bucketed(value, 2, 1, 4, 0, 0),
        "epoch_cost": lambda value: padding.epoch_cost([[0]], value),
        "pack": lambda value: packing.pack(value, 8)}.items()},
    **{f"{name} of {number}": Entry(name, call, NO_COUNT) for number, (name, call) in enumerate((
        ("batch_size", lambda value: batching.length_sorted([1, 2], value)),
        ("batch_size", lambda value: batching.shuffled(9, value, 1, 0, 0)),
        ("micro_batch", lambda value: batching.shuffled(9, 2, value, 0, 0)),
        ("window", lambda value: batching.bucketed([1, 2], 2, 1, value, 0, 0)),
        ("capacity", lambda value: packing.pack([1, 2], value)),
        ("longest", batching.padded_length),
        ("multiple_of", lambda value: batching.padded_length(9, value))))},
    "restore": Entry("", lambda value: padding.restore([1], value), (), LISTED),
    "batches": Entry("", lambda value: padding.epoch_cost(value, [4]), (), LISTED),
    "examples of a batch": Entry("names an example", lambda value: padding.epoch_cost(value, [4]),
                                 (), ([[1]], [[-1]], [[0], [7]])),
    **{order.__name__: Entry("labels", order, (), (
        None, "abc", 3, 1.5, {}, [1.5], ["a"], [[1]], object))
       for order in (sets.balanced_order, sets.proportional_order)},
    "a subset's seed": Entry("seed", lambda value: sets.balanced_order([0, 1], value), NO_WHOLE,
                             (2**32,)),
    # sys.executable is any file that is there: it is never started
    "ranks": of(launch, "ranks", NO_COUNT, (1025,), script=sys.executable),
    "timeout": of(launch, "timeout", POSITIVE, script=sys.executable),
    "variables": Entry("env['X']", lambda value: launch(sys.executable, env={"X": value}), (), (
        3, None, True, b"x", ["x"])),
    "a script": Entry("must be the path of a Python file", launch, (), (
        None, 3, ["ranks.py"], "a\0b", True)),
}  # fmt: skip


@pytest.fixture
def nothing_starts(monkeypatch):
    """What is wrong must be said before a model is made or a process is started."""

    def starts(*_, **__):
        raise AssertionError("work was begun")

    monkeypatch.setattr(subprocess, "Popen", starts)
    monkeypatch.setattr(train, "train_step", starts)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_wrong_value_is_one_sentence_that_names_it(name, nothing_starts):
    refuses_all(ENTRIES[name])


def test_the_property_fails_where_a_value_is_taken_or_another_thing_is_named():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refuses_all(of(Recipe, "steps", (), (4,)))
    with pytest.raises(AssertionError, match="does not say"):
        refuses_all(Entry("steps", lambda value: Recipe(seed=value), (), (-1,)))


@pytest.mark.parametrize(
    "source", [None, 3, 1.5, [], {}, True, "x" * 9999, "~nosuchuser/x"], ids=lambda v: repr(v)[:9]
)
def test_a_model_has_a_name_or_a_configuration(source):
    refused((*WRONG, OSError, RuntimeError), [], lambda: plan_model(source))


@pytest.mark.parametrize("name", ["none.py", "", "folder"])
def test_a_script_that_is_not_there_is_one_sentence(name, tmp_path, nothing_starts):
    (tmp_path / "folder").mkdir()
    refused(FileNotFoundError, "There is no script", lambda: launch(tmp_path / name))

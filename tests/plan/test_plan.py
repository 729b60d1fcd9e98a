"""The planner against torch's own tracker and counts, formulas, and itself."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from helpers import models, train
from helpers.plan import fake_batch, interpolation, plan, plan_at, remedies_of, trace_recipe
from helpers.recipe import Recipe, replace
from tests.night import few_by_day
from tests.plan.mem_tracker import naive
from tight_fit import gpus
from tight_fit.plans.model import plan_model
from tight_fit.search.remedies import least_peak
from tight_fit.techniques.step import loss_sum
from tight_fit.trace.fake_mode import FakeTensorMode

MINI = {
    "deberta": Recipe(batch_size=8, length=32),
    "vit": Recipe(model="vit", batch_size=8),
    "decoder": Recipe(model="decoder", batch_size=8, length=40),
}
T4 = gpus.GPUS["T4"]


@pytest.mark.parametrize("recipe", MINI.values(), ids=MINI)
def test_torchs_own_tracker_agrees_by_category(recipe):
    """torch.distributed._tools.MemTracker, another implementation, on the same fake step."""
    _, seen = naive(recipe)
    assert plan(recipe, "cpu").at_peak == {
        "parameters": seen["PARAM"] + seen["BUFFER"],
        "gradients": seen["GRAD"],
        "optimizer states": seen["OPT"],
        "activations": seen["ACT"],
        "temporaries": seen["TEMP"],
    }


def test_flops_are_torchs_own_count():
    recipe = MINI["deberta"]
    net = models.build(recipe)
    batch = train.encoded(recipe)["train"].batch(range(recipe.batch_size))
    with FlopCounterMode(display=False) as forward:
        loss = loss_sum(net, batch, recipe)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    flops = plan(recipe, "cpu").flops
    seen = forward.get_total_flops(), backward.get_total_flops()
    assert flops == {"forward": seen[0], "recompute": 0, "backward": seen[1]}
    groups = replace(recipe, batch_size=4 * recipe.batch_size, accumulation=4)
    assert plan(groups, "cpu").flops == {name: 4 * count for name, count in flops.items()}


def test_fused_attention_counts_the_flops_of_the_plain_formula():
    """Ours for the CPU's attention kernel equals the products written out; torch has none before
    2.15, and the same."""
    recipe = MINI["vit"]
    shape = models.config(recipe)
    tokens = (shape.image_size // shape.patch_size) ** 2 + 1
    with FakeTensorMode(allow_non_fake_inputs=True):
        net = models.empty(recipe)
        with FlopCounterMode(display=False) as counter:
            loss_sum(net, fake_batch(net, recipe), recipe)
    attention = 2 * 2 * recipe.batch_size * shape.num_hidden_layers * tokens**2 * shape.hidden_size
    counts = counter.get_flop_counts()["Global"]
    torchs = sum(flops for kernel, flops in counts.items() if "attention" in str(kernel))
    assert torchs in (0, attention)
    assert plan(recipe, "cpu").flops["forward"] == counter.get_total_flops() - torchs + attention


@pytest.mark.parametrize("model", MINI)
def test_checkpointing_costs_one_more_forward_of_the_layers(model):
    """All of each layer for DeBERTa. A layer of the others ends in a linear layer whose output
    nothing saves: torch stops before it."""
    recipe = MINI[model]
    shape, examples = models.config(recipe), recipe.batch_size
    plain, again = (plan(replace(recipe, checkpointing=on), "cpu").flops for on in (False, True))
    assert again["forward"] == plain["forward"] and again["backward"] == plain["backward"]
    width = shape.hidden_size
    last = width * shape.intermediate_size * shape.num_hidden_layers  # those linear layers
    if model == "deberta":  # the classifier and the pooler
        outside = examples * width * (recipe.classes + width)
    elif model == "decoder":  # the logits of every token instead of a classifier
        outside = examples * recipe.tokens * (width * shape.vocab_size + last)
    else:
        patches = (shape.image_size // shape.patch_size) ** 2
        embedded = patches * width * shape.num_channels * shape.patch_size**2
        outside = examples * (width * recipe.classes + embedded + (patches + 1) * last)
    assert again["recompute"] == plain["forward"] - 2 * outside


@pytest.mark.parametrize("model, fields", [("deberta", {}), ("decoder", {"lora_rank": 4})])
def test_checkpointed_layers_that_are_frozen_are_neither_recomputed_nor_gone_back_through(
    model, fields
):
    """With checkpointing, transformers makes the embeddings' output require a gradient."""
    half, whole = (replace(MINI[model], frozen=frozen, **fields) for frozen in (2, 0))
    recipes = half, replace(half, checkpointing=True), replace(whole, checkpointing=True)
    plain, again, all_again = (plan(recipe, "cpu").flops for recipe in recipes)
    assert again["backward"] == plain["backward"]
    share = 1 - 2 / MINI[model].layers
    assert again["recompute"] == pytest.approx(share * all_again["recompute"], rel=0.02)


# Bytes that depend on nothing but the architecture, from the formulas of the papers.
@pytest.mark.parametrize(
    "model, fields, parameters",
    [
        ("deberta", {}, 183_831_552 + 768 * 768 + 768 + 768 * 20 + 20),
        ("deberta-large", {}, 434_012_160 + 1024 * 1024 + 1024 + 1024 * 20 + 20),
        ("vit", {}, 85_798_656 + 768 * 10 + 10),
        ("decoder", {"length": 32}, 596_049_920),
        ("decoder-1.7b", {"length": 32}, 1_720_574_976),
    ],
    ids=["deberta-v3-base", "deberta-v3-large", "vit-b/16", "qwen3-0.6b", "qwen3-1.7b"],
)
def test_full_models_have_the_published_sizes(model, fields, parameters):
    planned = plan(Recipe(model, profile="full", **fields))
    assert planned.parameters == parameters
    assert planned.at_peak["parameters"] == pytest.approx(4 * parameters, rel=1e-3)
    assert planned.at_peak["optimizer states"] == pytest.approx(8 * parameters, rel=1e-3)


def test_the_cuda_plan_rounds_as_the_cuda_allocator_does_and_keeps_softmax_in_fp32():
    recipe = replace(MINI["deberta"], precision="fp16")
    shape = models.config(recipe)
    scores = recipe.batch_size * shape.num_attention_heads * recipe.tokens**2
    for device, width in (("cuda", 4), ("cpu", 2)):
        trace = trace_recipe(recipe, device)[0]
        sizes = [size for size, op in zip(trace.bytes, trace.made_by) if op == "_softmax"]
        assert sizes == [scores * width] * shape.num_hidden_layers
    largest = [size for size, _, _ in plan(recipe, "cuda").largest_tensors]
    assert all(size % 512 == 0 for size in largest)
    assert max(trace_recipe(recipe, "cuda")[0].bytes) <= max(largest) + 512


def test_fits_names_its_terms_and_adds_them_up():
    recipe = Recipe(profile="full", model="vit", batch_size=32)
    fit = plan(recipe).fits("T4")
    names = {"tensors at the peak", "cuBLAS workspace", "allocator", "margin", "CUDA context"}
    assert set(fit.terms) == names and fit.need == sum(fit.terms.values())
    assert fit and fit.over == fit.need - T4.memory < 0 and "to spare" in str(fit)
    assert not plan(replace(recipe, batch_size=512)).fits("T4")


def test_remedies_fit_and_change_one_field():
    recipe = Recipe("vit", profile="full", batch_size=256)
    assert not plan(recipe).fits(T4)
    changes = remedies_of(recipe, T4).changes()
    assert changes and all(len(change) == 1 for change in changes)
    assert all(plan(replace(recipe, **change)).fits(T4) for change in changes)
    (smallest,) = (change["accumulation"] for change in changes if "accumulation" in change)
    assert not plan(replace(recipe, accumulation=smallest // 2)).fits(T4)
    halves = {change["precision"] for change in changes if "precision" in change}
    assert halves <= {"fp16"}, "a T4 has no bf16 arithmetic"
    room_for_cuda_alone = T4._replace(memory=gpus.CONTEXT + 2**24)
    for gpu in (room_for_cuda_alone, T4):  # nothing helps, or nothing is needed
        assert remedies_of(MINI["deberta"], gpu).changes() == []


@pytest.mark.parametrize(
    "model, fields", few_by_day([("vit", {"checkpointing": True}), ("deberta", {})]), ids=str
)
def test_the_bound_for_more_micro_batches_is_a_lower_one(model, fields):
    now = plan(Recipe(model, batch_size=16, **fields))
    for number in (4, 16):
        assert least_peak(now, number) <= plan(replace(now.recipe, accumulation=number)).peak


@pytest.mark.parametrize("device", few_by_day(["cuda", "cpu"]))
@settings(max_examples=2, deadline=None)
@example(examples=1, length=40, accumulation=1)
@given(examples=st.integers(1, 24), length=st.integers(3, 96), accumulation=st.sampled_from([1, 3]))
def test_the_interpolation_is_the_plan(device, examples, length, accumulation):
    recipe = Recipe(batch_size=examples * accumulation, length=length, accumulation=accumulation)
    direct, quick = plan(recipe, device), interpolation(recipe, device).plan(recipe)
    assert np.array_equal(direct.timeline, quick.timeline)
    assert direct.flops == quick.flops and direct.largest_tensors == quick.largest_tensors


@pytest.mark.parametrize(
    "model, shape", [("deberta", {"batch_size": 64, "length": 96}), ("vit", {"batch_size": 48})]
)
def test_the_interpolation_holds_for_full_models(model, shape):
    base = plan(Recipe(model, profile="full"))
    assert plan_at(base, **shape).peak == plan(Recipe(model, profile="full", **shape)).peak
    with pytest.raises(TypeError, match="plan of a Recipe"):
        plan_at(plan_model(models.config(MINI["vit"]), batch_size=2), batch_size=4)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adamw_stochastic", "muon"])
def test_the_plan_needs_little_memory_and_no_network(optimizer, monkeypatch):
    """Planning 8 GiB must not take them: the process grows by less than half of the weights.

    No socket is opened either.
    """
    import resource
    import socket

    def refuse(*arguments, **keywords):
        raise AssertionError("the planner opened a socket")

    def most() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    monkeypatch.setattr(socket, "socket", refuse)
    if Path("/proc/self/clear_refs").exists():  # Linux: from here on it is the most of this test
        Path("/proc/self/clear_refs").write_text("5")
    before = most()
    base = "bf16" if optimizer == "adamw_stochastic" else "fp32"
    planned = plan(Recipe(profile="full", batch_size=17, optimizer=optimizer, base=base))
    assert planned.peak > (3 if base == "bf16" else 7) * 2**30
    assert most() - before < 2 * planned.parameters

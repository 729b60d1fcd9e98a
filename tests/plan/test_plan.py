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
from tight_fit.optimizer_kinds import OPTIMIZERS
from tight_fit.plans.model import plan_model
from tight_fit.search.remedies import least_peak
from tight_fit.techniques.step import loss_sum
from tight_fit.torch_private import FakeTensorMode

MINI = {
    "deberta": Recipe(batch_size=8, length=32),
    "vit": Recipe(model="vit", batch_size=8),
    "decoder": Recipe(model="decoder", batch_size=8, length=40),
}


@pytest.mark.parametrize("recipe", MINI.values(), ids=MINI)
def test_torchs_own_tracker_agrees_by_category(recipe):
    """torch.distributed._tools.MemTracker, another implementation, on the same fake step."""
    _, seen = naive(recipe)
    planned = plan(recipe, "cpu").at_peak
    assert planned == {
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
    assert flops == {
        "forward": forward.get_total_flops(),
        "recompute": 0,
        "backward": backward.get_total_flops(),
    }
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
    """All of each layer for DeBERTa. A ViT layer ends in a linear layer whose output nothing saves:
    torch stops before it."""
    recipe = MINI[model]
    shape, examples = models.config(recipe), recipe.batch_size
    plain, again = (plan(replace(recipe, checkpointing=on), "cpu").flops for on in (False, True))
    assert again["forward"] == plain["forward"] and again["backward"] == plain["backward"]
    outside = 2 * examples * shape.hidden_size * recipe.classes  # the classifier
    if model == "deberta":
        outside += 2 * examples * shape.hidden_size**2  # the pooler
    elif model == "decoder":  # the logits of every token instead of a classifier
        tokens = examples * recipe.tokens
        outside = 2 * tokens * shape.hidden_size * shape.vocab_size
        # And each layer ends in a linear layer whose output nothing saves.
        layers, wide = shape.num_hidden_layers, shape.intermediate_size
        outside += 2 * tokens * shape.hidden_size * wide * layers
    else:
        patches = (shape.image_size // shape.patch_size) ** 2
        outside += (
            2 * examples * patches * shape.hidden_size * shape.num_channels * shape.patch_size**2
        )
        outside += (
            2
            * examples
            * (patches + 1)
            * shape.hidden_size
            * shape.intermediate_size
            * shape.num_hidden_layers
        )
    assert again["recompute"] == plain["forward"] - outside


@pytest.mark.parametrize("fields", [{}, {"lora_rank": 4}], ids=["frozen", "frozen-lora"])
@pytest.mark.parametrize("model", MINI)
def test_checkpointed_layers_that_are_frozen_are_neither_recomputed_nor_gone_back_through(
    model, fields
):
    """With checkpointing, transformers makes the embeddings' output require a gradient."""
    half, whole = (replace(MINI[model], frozen=frozen, **fields) for frozen in (2, 0))
    plain, again, all_again = (
        plan(recipe, "cpu").flops
        for recipe in (half, replace(half, checkpointing=True), replace(whole, checkpointing=True))
    )
    assert again["backward"] == plain["backward"]
    share = 1 - 2 / MINI[model].layers
    assert again["recompute"] == pytest.approx(share * all_again["recompute"], rel=0.02)


def test_accumulation_keeps_gradients_alive_in_the_next_forward_pass():
    """One micro-batch or four of its size: the second forward pass has gradients beside it."""
    recipe = Recipe(profile="full", batch_size=4)
    single, four = plan(recipe), plan(replace(recipe, batch_size=16, accumulation=4))
    gradients = 4 * single.parameters
    assert four.at_peak["gradients"] == pytest.approx(gradients, rel=1e-3)
    assert four.peak - single.peak == pytest.approx(gradients, rel=0.02)
    assert sum(four.flops.values()) == 4 * sum(single.flops.values())
    assert plan(replace(recipe, batch_size=8, accumulation=2)).peak == four.peak, (
        "from the third on nothing is new"
    )


# Bytes that depend on nothing but the architecture, from the formulas of the papers.
@pytest.mark.parametrize(
    "recipe, parameters",
    [
        (Recipe(profile="full"), 183_831_552 + 768 * 768 + 768 + 768 * 20 + 20),
        (
            Recipe(profile="full", model="deberta-large"),
            434_012_160 + 1024 * 1024 + 1024 + 1024 * 20 + 20,
        ),
        (Recipe(profile="full", model="vit"), 85_798_656 + 768 * 10 + 10),
        (Recipe(profile="full", model="decoder", length=32), 596_049_920),
        (Recipe(profile="full", model="decoder-1.7b", length=32), 1_720_574_976),
    ],
    ids=["deberta-v3-base", "deberta-v3-large", "vit-b/16", "qwen3-0.6b", "qwen3-1.7b"],
)
def test_full_models_have_the_published_sizes(recipe, parameters):
    planned = plan(recipe)
    assert planned.parameters == parameters
    assert planned.at_peak["parameters"] == pytest.approx(4 * parameters, rel=1e-3)
    assert planned.at_peak["optimizer states"] == pytest.approx(8 * parameters, rel=1e-3)


def test_the_cuda_plan_rounds_as_the_cuda_allocator_does():
    traced = trace_recipe(MINI["vit"], "cuda")[0]
    planned = plan(MINI["vit"], "cuda")
    assert all(size % 512 == 0 for size, _, _ in planned.largest_tensors)
    assert max(traced.bytes) <= max(size for size, _, _ in planned.largest_tensors) + 512


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_cuda_autocast_keeps_softmax_in_fp32(precision):
    recipe = replace(MINI["deberta"], precision=precision)
    examples, tokens, heads = (
        recipe.batch_size,
        recipe.tokens,
        models.config(recipe).num_attention_heads,
    )
    for device, width in (("cuda", 4), ("cpu", 2)):
        storage_trace = trace_recipe(recipe, device)[0]
        sizes = [
            size for size, op in zip(storage_trace.bytes, storage_trace.made_by) if op == "_softmax"
        ]
        assert (
            sizes
            == [examples * heads * tokens * tokens * width]
            * models.config(recipe).num_hidden_layers
        )


def test_fits_names_its_terms_and_adds_them_up():
    recipe = Recipe(profile="full", model="vit", batch_size=32)
    fit = plan(recipe).fits("T4")
    assert set(fit.terms) == {
        "tensors at the peak",
        "cuBLAS workspace",
        "allocator",
        "margin",
        "CUDA context",
    }
    assert (
        fit
        and fit.need == sum(fit.terms.values())
        and fit.over == fit.need - gpus.GPUS["T4"].memory < 0
    )
    assert not plan(replace(recipe, batch_size=512)).fits("T4")
    assert "to spare" in str(fit)


def test_remedies_fit_and_change_one_field():
    recipe = Recipe("vit", profile="full", batch_size=256)
    gpu = gpus.GPUS["T4"]
    assert not plan(recipe).fits(gpu)
    changes = remedies_of(recipe, gpu).changes()
    assert changes and all(len(change) == 1 for change in changes)
    assert all(plan(replace(recipe, **change)).fits(gpu) for change in changes)
    (smallest,) = (change["accumulation"] for change in changes if "accumulation" in change)
    assert not plan(replace(recipe, accumulation=smallest // 2)).fits(gpu)
    assert [change["precision"] for change in changes if "precision" in change] in (
        [],
        ["fp16"],
    ), "a T4 has no bf16 arithmetic"


def test_nothing_is_offered_where_nothing_helps_or_nothing_is_needed():
    t4 = gpus.GPUS["T4"]
    room_for_cuda_alone = t4._replace(memory=gpus.CONTEXT + 2**24)
    assert remedies_of(MINI["deberta"], room_for_cuda_alone).changes() == []
    assert remedies_of(MINI["deberta"], t4).changes() == []


def test_a_plan_at_another_shape_needs_a_recipe():
    with pytest.raises(TypeError, match="plan of a Recipe"):
        plan_at(plan_model(models.config(MINI["vit"]), batch_size=2), batch_size=4)


def test_a_plan_whose_peak_was_read_is_copied_field_by_field():
    planned = plan(MINI["vit"])
    assert planned.peak_index >= 0
    copied = type(planned)(**vars(planned))
    assert copied.peak == planned.peak and replace(copied, flops={}).peak == planned.peak


@pytest.mark.parametrize(
    "model, fields",
    few_by_day(
        [
            ("vit", {"checkpointing": True}),
            ("deberta", {}),
            ("vit", {"optimizer": "sgd", "accumulation": 2}),
            ("vit", {"lora_rank": 2}),
        ]
    ),
    ids=str,
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


def test_the_interpolation_holds_for_full_models():
    base = plan(Recipe(profile="full"))
    assert (
        plan_at(base, batch_size=64, length=96).peak
        == plan(Recipe(profile="full", batch_size=64, length=96)).peak
    )
    vit = plan(Recipe(profile="full", model="vit"))
    assert (
        plan_at(vit, batch_size=48).peak
        == plan(Recipe(profile="full", model="vit", batch_size=48)).peak
    )


@pytest.mark.parametrize("optimizer", few_by_day(OPTIMIZERS, 5))
def test_the_plan_needs_little_memory_and_no_network(optimizer, monkeypatch):
    """Planning 8 GiB must not take them: the process grows by less than half of the weights.

    No socket is opened either.
    """
    import resource
    import socket

    def refuse(*arguments, **keywords):
        raise AssertionError("the planner opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # Linux: from here on it is the most of this test, not of those before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    base = "bf16" if optimizer == "adamw_stochastic" else "fp32"
    planned = plan(Recipe(profile="full", batch_size=17, optimizer=optimizer, base=base))
    assert planned.peak > (3 if base == "bf16" else 7) * 2**30
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    ) * 1024 < 2 * planned.parameters

"""One-call tables of lessons: they say what plans say, of GPUs and of layouts."""

import json

import pytest
from transformers import LlamaConfig

from helpers import ladder, show
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from helpers.record import RESULTS
from helpers.show import phases, plans
from tests.small import configured
from tight_fit.kernels.kernel_time import constants
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep
from tight_fit.units import size, span

VIT = Recipe("vit", profile="full", batch_size=32)
MINI = Recipe("vit", batch_size=8)
HALF, AGAIN = replace(VIT, precision="fp16"), replace(VIT, checkpointing=True)


def test_a_cell_is_the_plans_own_time_or_says_what_a_gpu_cannot_do(monkeypatch):
    monkeypatch.setattr(show, "measured_steps", list)
    table = plans({"plain": VIT, "again": AGAIN}, gpus=("T4", "RTX 3060", "A100-40GB"))
    first, second = table.frame.to_dict("records")
    assert list(first) == ["planned", "peak", "T4", "RTX 3060", "A100-40GB"]
    assert first["peak"] == size(plan(VIT).peak) and second["peak"] == size(plan(AGAIN).peak)
    plain, again = (plan(recipe).seconds("A100-40GB").total for recipe in (VIT, AGAIN))
    assert first["A100-40GB"] == f"{plain * 1e3:.0f} ms"
    assert second["A100-40GB"] == f"{again * 1e3:.0f} ms (× {again / plain:.2f})"
    assert again > 1.2 * plain  # a third more work is done
    assert table.caption.startswith("Planned, not run") and len(table.caption.split()) < 30
    assert f"{max(constants()['shared']['error'].values()):.0%}" in table.caption
    recipes = {"bf16": replace(VIT, precision="bf16"), "fp32": VIT, "fp16": plan(VIT)}
    table = plans(recipes, gpus=("GTX 1650", "T4"))
    assert list(table.frame["GTX 1650"]) == ["no bf16", "does not fit", "does not fit"]
    first, second, third = table.frame["T4"]
    assert first == "no bf16" and "×" not in second  # the first that has a time is the measure
    assert third.endswith("(× 1.00)")


def test_bf16_takes_as_much_as_fp16():
    """As a caption says of fp16 alone, so that it serves readers of newer GPUs than a T4."""
    for step in (Recipe("deberta", profile="full", batch_size=16, length=256), VIT):
        half, brain = (plan(replace(step, precision=precision)) for precision in ("fp16", "bf16"))
        assert brain.peak == pytest.approx(half.peak, rel=1e-3)
        for gpu in ("RTX 3060", "A100-40GB", "H100"):
            assert brain.seconds(gpu).total == pytest.approx(half.seconds(gpu).total, rel=0.03)


def test_the_phases_are_shares_of_the_step():
    row, plain = phases({"again": AGAIN, "plain": VIT}, "T4").frame.to_dict("records")
    names = ("forward", "backward", "recompute", "optimizer")
    shares = [int(row[name].rstrip("%")) for name in names]
    assert sum(shares) == pytest.approx(100, abs=2) and min(shares) > 0
    took = plan(VIT).seconds("T4")
    assert plain["backward"] == f"{took.phases['backward'] / took.total:.0%}"
    assert plain["recompute"] == "0%"


def test_phases_on_what_cannot_run_the_step_are_refused():
    with pytest.raises(ValueError, match="has no bf16"):
        phases({"half": replace(VIT, precision="bf16")}, "T4")
    with pytest.raises(ValueError, match="no seconds"):
        phases({"CPU": plan(Recipe(), "cpu")}, "T4")


def test_a_step_that_a_gpu_measured_stands_beside_its_plan():
    """From the file itself, not by the function that the table asks."""
    kept = json.loads((RESULTS / "steps" / "nvidia-h200.json").read_text(encoding="utf8"))["steps"]
    asked = [one for one in kept if one["technique"] == "mixed precision, bf16"]
    texts = [one for one in asked if "model" not in one["recipe"]]
    (seen,) = [one for one in texts if one["recipe"]["profile"] == "full"]
    sizes = {"batch_size": 16, "length": 256, "steps": 7, "seed": 3}
    bf16 = Recipe(profile="full", precision="bf16", **sizes)
    shown = plans({"bf16": bf16, "32 examples": replace(bf16, batch_size=32)}, gpus=["H200"])
    measured = [row["NVIDIA H200, measured"] for row in shown.frame.to_dict("records")]
    assert measured == [f"{size(seen['allocated'])}, {span(seen['seconds'])}", ""]
    assert shown.caption.endswith("on a real NVIDIA H200; a small one waits for its CPU.")
    changed = plans({"changed": plan(bf16)}, gpus=["H200"])
    assert list(changed.frame) == ["planned", "peak", "H200"]


def test_both_memories_and_the_difference_of_a_rung():
    plans = {"plain": plan(MINI), "moved": plan(replace(MINI, offload="optimizer"))}
    first, second = show.moved(plans, ["T4", "A100-40GB"]).frame.to_dict("records")
    assert first["on the host"] == "nothing" and first["this rung"] == ""
    assert second["planned"] == "moved" and second["on the host"] == size(plans["moved"].host)
    assert second["this rung"] == f"-{size(plans['plain'].peak - plans['moved'].peak)}"
    assert first["T4"].endswith("ms") and second["T4"].endswith("ms")
    large = plan(Recipe("vit", profile="full", batch_size=1024))
    plans = {"large": large, "bf16": plan(replace(MINI, precision="bf16"))}
    assert list(show.moved(plans, ["T4"]).frame["T4"]) == ["does not fit", "no bf16"]


def test_rungs_and_savings_are_those_of_the_planned_climb():
    table = show.rungs().frame
    plans = [plan(recipe) for recipe in ladder.climb(ladder.START).values()]
    assert list(table["rung"]) == list(ladder.rungs(ladder.START))
    assert list(table["peak"]) == [size(one.peak) for one in plans]
    assert table["of the start"][0] == "100%"
    table = show.savings().frame
    row = table[table["technique"] == "LoRA"].iloc[0]
    alone = plan(ladder.alone(ladder.START)["LoRA"])
    away = plan(ladder.without(ladder.START)["LoRA"])
    assert row["alone"] == size(plans[0].peak - alone.peak)
    assert row["taken away"] == size(away.peak - plan(ladder.top(ladder.START)).peak)
    assert list(table["technique"]) == list(ladder.without(ladder.START))


CLUSTER = Cluster("T4", per_machine=2)
ONE, TWO = parse("ddp=1"), parse("fsdp=2")


def small(layers=2, **fields) -> ModelStep:
    config = configured(LlamaConfig, 32, layers, 4, 72, 96, num_key_value_heads=2)
    usual = {"batch_size": 4, "length": 16, "weights": "fp32", "precision": "fp16"}
    return ModelStep(config, **usual | fields)


def test_a_layout_may_have_a_step_of_its_own():
    accumulated = small(accumulation=4)
    table = show.layouts(small(), {"whole": ONE, "cut": (ONE, accumulated)}, CLUSTER)
    expected = [facts_of(plan_step(step, ONE), CLUSTER) for step in (small(), accumulated)]
    assert list(table.frame["need per GPU"]) == [size(facts["need"]) for facts in expected]
    assert table.caption.endswith(", not compiled.")  # which describes both rows
    table = show.layouts(small(precision="fp32"), {"whole": ONE, "half": (ONE, small())}, CLUSTER)
    assert "computed in fp32 without TF32" in table.caption
    assert table.caption.endswith("; half: computed in fp16 with loss scaling.")


def test_a_row_of_any_model_is_its_plan():
    table = show.layouts(small(), {"one": ONE, "two": TWO}, CLUSTER)
    one, two = table.frame.iloc
    facts = facts_of(plan_step(small(), TWO), CLUSTER)
    assert two["need per GPU"] == size(facts["need"]) and two["fits"] == "yes"
    assert two["sent per GPU and step"] == size(sum(facts["sent"]["data"].values()))
    assert two["tokens per second"] == f"{4 * 16 / facts['seconds']:,.0f}"
    assert one["sent per GPU and step"] == "nothing"
    assert "fp16 with loss scaling, fused AdamW, fused (sdpa) attention" in str(table)
    again = show.layouts(small(layers=4), {"two": TWO}, CLUSTER)
    assert again.frame.iloc[0]["sent per GPU and step"] != two["sent per GPU and step"]
    large = small(batch_size=2**16, length=512)
    table = show.layouts(large, {"one": ONE}, Cluster("GTX 1650"))
    assert table.frame.iloc[0]["fits"].startswith("no, ") and "too much" in str(table)
    with pytest.raises(TypeError, match="job must be of type ModelStep"):
        show.layouts(Recipe(), {"one": ONE}, CLUSTER)

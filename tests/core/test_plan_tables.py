"""One-call tables of lessons: they say what plans say, and where a GPU cannot."""

import json

import pytest

from helpers import show
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from helpers.record import RESULTS
from helpers.show import phases, plans
from tight_fit.kernels.kernel_time import constants
from tight_fit.units import size, span

VIT = Recipe("vit", profile="full", batch_size=32)
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

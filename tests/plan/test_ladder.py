"""The ladder: its rungs as data, and their plans."""

import itertools

import pytest

from exercises.nb19 import BLOG, confounded
from helpers import ladder, plots
from helpers.plan import plan
from helpers.recipe import Recipe, difference, replace
from tight_fit import gpus
from tight_fit.units import GIB

MINI = Recipe("deberta", profile="mini", length=64, batch_size=16)


@pytest.mark.parametrize("start, half", [(MINI, "bf16"), (ladder.START, "fp16")])
def test_each_rung_changes_one_field_and_keeps_the_rest(start, half):
    steps = ladder.rungs(start, half)
    climbed = ladder.climb(start, steps)
    assert list(climbed) == list(steps) and climbed[ladder.FIRST] == start
    for (_, before), (name, after) in itertools.pairwise(climbed.items()):
        assert {field: new for field, (_, new) in difference(before, after).items()} == steps[name]
        assert len(steps[name]) == 1
    full = ladder.top(start, steps)
    assert full == list(climbed.values())[-1]
    assert {recipe.batch_size for recipe in climbed.values()} == {start.batch_size}
    away, alone = ladder.without(start, steps), ladder.alone(start, steps)
    last = [name for name in steps if name not in (ladder.FIRST, "dynamic padding")]
    assert list(away) == list(alone) == last
    for name in last:
        (field,) = steps[name]
        assert list(difference(away[name], full)) == [field]
        assert list(difference(start, alone[name])) == [field]
        assert getattr(away[name], field) == getattr(start, field)
    with pytest.raises(ValueError, match="half='fp32' is no 16-bit precision"):
        ladder.rungs(start, "fp32")


def test_a_ladder_of_ones_own():
    steps = {"start": {}, "short": {"length": 32}, "shorter": {"length": 16}}
    steps["again"] = {"checkpointing": True}
    assert [recipe.length for recipe in ladder.climb(MINI, steps).values()] == [64, 32, 16, 16]
    away = ladder.without(MINI, steps)
    assert list(away) == ["shorter", "again"]  # "short" is not there to be taken away
    assert away["shorter"] == replace(MINI, checkpointing=True)
    rate = {"learning_rate": (None, 3 * MINI.peak_learning_rate)}
    assert difference(MINI, ladder.own_rate(MINI, 3)) == rate


def test_the_smallest_gpu_and_the_bar_of_a_plan_that_is_as_long_as_its_need():
    small = gpus.find("GTX 1650")
    assert ladder.smallest(plan(MINI)) == (small, "fp32")
    half = plan(replace(MINI, precision="bf16"))
    assert ladder.smallest(half) == (small, "fp16")  # it has no bf16
    large = plan(ladder.START)
    gpu, _ = ladder.smallest(large)
    assert large.fits(gpu)
    assert not any(large.fits(other) for other in gpus.GPUS.values() if other.memory < gpu.memory)
    assert ladder.smallest(plan(replace(ladder.START, batch_size=4096))) is None
    axis = plots.categories({"start": large}, gpu="T4").axes[0]
    bars = [patch.get_width() for patch in axis.patches]
    assert sum(bars) * GIB == pytest.approx(large.fits("T4").need)


def test_the_blogs_confounded_rows_are_those_whose_peak_something_else_moved():
    def peak(recipe):
        sizes = {"length": recipe.length // 4, "frozen": recipe.frozen and 2}
        return plan(replace(recipe, profile="mini", **sizes), "cpu").peak

    claimed = {
        "accumulation": ("accumulation", "batch_size"), "bf16": ("precision",),
        "padding": ("padding",), "checkpointing": ("checkpointing",), "8-bit": ("optimizer",),
        "freezing": ("frozen",), "LoRA": ("lora_rank",),
    }  # fmt: skip
    moved = set()
    for (_, before), (name, after) in itertools.pairwise(BLOG):
        fair = replace(before, **{field: getattr(after, field) for field in claimed[name]})
        if peak(fair) != peak(after):
            moved.add(name)
    assert moved == confounded()

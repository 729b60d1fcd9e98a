"""The ladder: its rungs as data, and their plans."""

import itertools

import numpy as np
import pytest

from exercises.nb19 import BLOG, confounded
from helpers import ladder, plots
from helpers.plan import plan
from helpers.recipe import Recipe, difference, replace
from tight_fit import gpus
from tight_fit.units import GIB

MINI = Recipe("deberta", profile="mini", length=64, batch_size=16)
LAST = [name for name in ladder.rungs(MINI) if name not in (ladder.FIRST, "dynamic padding")]


@pytest.mark.parametrize(
    "start", [MINI, ladder.START, Recipe("deberta", profile="full")], ids=["mini", "large", "base"]
)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_each_rung_changes_one_field_and_keeps_the_rest(start, half):
    steps = ladder.rungs(start, half)
    climbed = ladder.climb(start, steps)
    assert list(climbed) == list(steps) and climbed[ladder.FIRST] == start
    for (_, before), (name, after) in itertools.pairwise(climbed.items()):
        assert {field: new for field, (_, new) in difference(before, after).items()} == steps[name]
        assert len(steps[name]) == 1
    assert ladder.top(start, steps) == list(climbed.values())[-1]
    assert {recipe.batch_size for recipe in climbed.values()} == {start.batch_size}


def test_half_is_a_16_bit_precision():
    with pytest.raises(ValueError, match="half='fp32' is no 16-bit precision"):
        ladder.rungs(MINI, "fp32")


def test_taken_away_and_alone_differ_in_the_rungs_own_field():
    full = ladder.top(MINI)
    away, alone = ladder.without(MINI), ladder.alone(MINI)
    assert list(away) == list(alone) == LAST
    for name, change in ladder.rungs(MINI).items():
        if name in away:
            assert (
                list(difference(away[name], full))
                == list(difference(MINI, alone[name]))
                == list(change)
            )
            assert all(getattr(away[name], field) == getattr(MINI, field) for field in change)


def test_a_ladder_of_ones_own():
    steps = {
        "start": {},
        "short": {"length": 32},
        "shorter": {"length": 16},
        "again": {"checkpointing": True},
    }
    assert [recipe.length for recipe in ladder.climb(MINI, steps).values()] == [64, 32, 16, 16]
    assert list(ladder.without(MINI, steps)) == [
        "shorter",
        "again",
    ]  # "short" is not there to be taken away
    assert ladder.without(MINI, steps)["shorter"] == replace(MINI, checkpointing=True)


def test_own_rate_changes_the_rate_alone():
    changed = ladder.own_rate(MINI, 3)
    assert difference(MINI, changed) == {"learning_rate": (None, 3 * MINI.peak_learning_rate)}


def test_the_smallest_gpu():
    small = plan(MINI)
    assert ladder.smallest(small) == (gpus.find("GTX 1650"), "fp32")
    assert ladder.smallest(plan(replace(MINI, precision="bf16"))) == (
        gpus.find("GTX 1650"),
        "fp16",
    )  # it has no bf16
    large = plan(ladder.START)
    gpu, _ = ladder.smallest(large)
    assert large.fits(gpu)
    assert not any(large.fits(other) for other in gpus.GPUS.values() if other.memory < gpu.memory)
    assert ladder.smallest(plan(replace(ladder.START, batch_size=4096))) is None


def test_flops_of_a_micro_batch_are_a_polynomial_in_its_width():
    recipe = ladder.top(MINI)
    counts = {
        length: sum(plan(replace(recipe, length=length), "cpu").flops.values())
        for length in (32, 64, 96, 128)
    }
    curve = np.polyfit([32, 64, 128], [counts[length] for length in (32, 64, 128)], 2)
    assert abs(np.polyval(curve, 96) / counts[96] - 1) < 1e-9


def test_the_blogs_confounded_rows_are_those_whose_peak_something_else_moved():
    def small(recipe):
        return replace(
            recipe, profile="mini", length=recipe.length // 4, frozen=recipe.frozen and 2
        )

    claimed = {
        "accumulation": ("accumulation", "batch_size"), "bf16": ("precision",),
        "padding": ("padding",), "checkpointing": ("checkpointing",), "8-bit": ("optimizer",),
        "freezing": ("frozen",), "LoRA": ("lora_rank",),
    }  # fmt: skip
    moved = set()
    for (_, before), (name, after) in itertools.pairwise(BLOG):
        fair = replace(before, **{field: getattr(after, field) for field in claimed[name]})
        if plan(small(fair), "cpu").peak != plan(small(after), "cpu").peak:
            moved.add(name)
    assert moved == confounded()


def test_the_bar_of_a_plan_is_as_long_as_its_need():
    large = plan(ladder.START)
    axis = plots.categories({"start": large}, gpu="T4").axes[0]
    bars = [patch.get_width() for patch in axis.patches]
    assert sum(bars) * GIB == pytest.approx(large.fits("T4").need)
    with pytest.raises(TypeError, match="plans\\['other'\\] must be a Plan"):
        plots.categories({"start": large, "other": 3})

"""The table of a ladder that moves memory to the host says what its plans say."""

import pytest

from helpers import show
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.units import size

RECIPE = Recipe("vit", batch_size=8)


def test_both_memories_and_the_difference_of_a_rung():
    plans = {
        "plain": plan(RECIPE),
        "moved": plan(replace(RECIPE, offload="optimizer")),
    }
    rows = show.moved(plans, ["T4", "A100-40GB"]).frame.to_dict("records")
    assert [row["planned"] for row in rows] == ["plain", "moved"]
    assert rows[0]["on the host"] == "nothing" and rows[0]["this rung"] == ""
    assert rows[1]["on the host"] == size(plans["moved"].host)
    assert rows[1]["this rung"] == f"-{size(plans['plain'].peak - plans['moved'].peak)}"
    assert all(row["T4"].endswith("ms") for row in rows)


def test_what_does_not_fit_and_what_a_gpu_cannot_compute():
    large = Recipe("vit", profile="full", batch_size=1024)
    plans = {"large": plan(large), "bf16": plan(replace(RECIPE, precision="bf16"))}
    rows = show.moved(plans, ["T4"]).frame.to_dict("records")
    assert [row["T4"] for row in rows] == ["does not fit", "no bf16"]


def test_a_recipe_is_no_plan():
    with pytest.raises(TypeError, match="Plan"):
        show.moved({"recipe": RECIPE}, ["T4"])

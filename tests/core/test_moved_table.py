"""The table of a ladder that moves memory to the host says what its plans say."""

from helpers import show
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.units import size

RECIPE = Recipe("vit", batch_size=8)


def test_both_memories_and_the_difference_of_a_rung():
    plans = {"plain": plan(RECIPE), "moved": plan(replace(RECIPE, offload="optimizer"))}
    first, second = show.moved(plans, ["T4", "A100-40GB"]).frame.to_dict("records")
    assert first["on the host"] == "nothing" and first["this rung"] == ""
    assert second["planned"] == "moved" and second["on the host"] == size(plans["moved"].host)
    assert second["this rung"] == f"-{size(plans['plain'].peak - plans['moved'].peak)}"
    assert first["T4"].endswith("ms") and second["T4"].endswith("ms")
    large = plan(Recipe("vit", profile="full", batch_size=1024))
    plans = {"large": large, "bf16": plan(replace(RECIPE, precision="bf16"))}
    assert list(show.moved(plans, ["T4"]).frame["T4"]) == ["does not fit", "no bf16"]

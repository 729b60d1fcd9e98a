"""The tables of the ladder: their sums are those of the plans."""

from helpers import ladder, show
from helpers.plan import plan
from tight_fit.units import size


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

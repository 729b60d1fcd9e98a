"""The tables of the ladder: their sums are those of the plans."""

from helpers import show
from helpers.plan import ladder
from tight_fit.units import size


def test_rungs_are_the_planned_climb():
    table = show.rungs().frame
    plans = [ladder.planned(recipe) for recipe in ladder.climb(ladder.START).values()]
    assert list(table["rung"]) == list(ladder.rungs(ladder.START))
    assert list(table["peak"]) == [size(plan.peak) for plan in plans]
    assert table["of the start"][0] == "100%"


def test_each_technique_is_asked_in_three_ways():
    table = show.savings().frame
    start, full = ladder.planned(ladder.START), ladder.planned(ladder.top(ladder.START))
    row = table[table["technique"] == "LoRA"].iloc[0]
    alone = ladder.planned(ladder.alone(ladder.START)["LoRA"])
    away = ladder.planned(ladder.without(ladder.START)["LoRA"])
    assert row["alone"] == size(start.peak - alone.peak)
    assert row["taken away"] == size(away.peak - full.peak)
    assert list(table["technique"]) == list(ladder.without(ladder.START))

"""The choice of a strategy: what is ranked, what is left out and why, and the plans that are kept for it."""
import itertools
from unittest.mock import patch

import pytest

from helpers import choices, choose as room
from helpers.cards import CONTEXT, Card, find
from helpers.choose import SCENARIOS, choose, hopeless, toggled
from helpers.parallel import Parallel
from helpers.parallel.cost import LINKS, Link
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from helpers.strategy import Machines, Row, span
from helpers.units import MIB

MINI = Recipe("vit", batch_size=32)
T4 = find("T4")


def tiny(room_for: int) -> Card:
    """A T4 with so many bytes for tensors."""
    return Card("T4", CONTEXT + int(16.25 * MIB) + int(room_for * 1.05) + 2, T4.capability)


# -- machines ------------------------------------------------------------------------------------------------

def test_an_axis_pays_the_link_that_its_ranks_reach():
    park = Machines("A100-40GB", 8, machines=2, inside="NVLink 3", between="Ethernet 10 Gbit")
    inside, between = LINKS["NVLink 3"], LINKS["Ethernet 10 Gbit"]
    assert park.links(Parallel(data=16))["data"] == between
    assert set(park.links(Parallel(data=8)).values()) == {inside}
    shared = park.links(Parallel(data=2, tensor=8))
    assert shared["tensor"] == inside and shared["data"].speed == between.speed / 8 and "shared by 8" in shared["data"].name
    staged = park.links(Parallel(data=8, pipeline=2))
    assert staged["data"] == inside and staged["pipeline"].speed == between.speed / 8
    assert park.links(Parallel(data=4, tensor=2))["data"] == inside
    assert park.links(Parallel(data=1, pipeline=16))["pipeline"].speed == between.speed  # one line from machine to machine


def test_links_agree_with_the_ranks_counted_one_by_one():
    for data, pipeline, tensor, per_machine in itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        if per_machine % tensor:
            continue
        parallel = Parallel(data=data, pipeline=pipeline, tensor=tensor)
        park = Machines("T4", per_machine, machines=-(-parallel.ranks // per_machine), inside=Link("in", 9e9, 0), between=Link("out", 1e9, 0))
        number = {(p, d, t): (p * data + d) * tensor + t for p in range(pipeline) for d in range(data) for t in range(tensor)}
        leaves = {"tensor": False, "data": False, "pipeline": False}
        for one, other in itertools.combinations(number, 2):
            apart = [axis for axis, a, b in zip(("pipeline", "data", "tensor"), one, other) if a != b]
            if len(apart) == 1 and number[one] // per_machine != number[other] // per_machine:
                leaves[apart[0]] = True
        found = park.links(parallel)
        for axis, out in leaves.items():
            if getattr(parallel, axis) > 1 and park.machines > 1:
                assert (found[axis].speed < 9e9) >= out, (parallel, per_machine, axis)
                if parallel.ranks % per_machine == 0 and (per_machine % (tensor * data) == 0 or (tensor * data) % per_machine == 0):
                    assert (found[axis].speed < 9e9) == out, (parallel, per_machine, axis)


def test_bad_machines():
    with pytest.raises(ValueError, match="card='K80' is not known"):
        Machines("K80")
    with pytest.raises(ValueError, match="link='string' is not known"):
        Machines("T4", inside="string")
    with pytest.raises(ValueError, match="machines=0 must be a whole number"):
        Machines("T4", machines=0)
    with pytest.raises(ValueError, match="more than one machine of 2"):
        Machines("T4", 2, machines=2).links(Parallel(tensor=4))


# -- choices -------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def two():
    return {goal: choose(MINI, Machines("T4", 2), goal) for goal in room.GOALS}


def test_every_goal_ranks_by_its_own(two):
    rows = {goal: [row for row in found.rows if row.fit and row.same] for goal, found in two.items()}
    assert all(row.fit for row in two["time"].rows) and len(two["time"].rows) == 7 and not two["time"].left_out
    assert [row.time.total for row in rows["time"]] == sorted(row.time.total for row in rows["time"])
    assert [row.peak for row in rows["memory"]] == sorted(row.peak for row in rows["memory"])
    assert [row.changes for row in rows["simplest"]] == sorted(row.changes for row in rows["simplest"])
    assert two["simplest"].best.name == "one card" and two["simplest"].best.changes == 0


def test_a_row_is_its_plan(two):
    row = two["time"].row("data 2, ZeRO-1")
    made = plan(MINI, parallel=Parallel(data=2, shard=1))
    assert (row.peak, row.plan.wire) == (made.peak, made.wire)
    assert row.time == made.seconds("T4", "PCIe 3 x16") and row.fit.terms == made.fits("T4").terms
    assert row.rows_per_second == pytest.approx(32 / row.time.total)
    assert f"{row.time.compute / row.time.total:.0%} of the step is work" in row.reason and row.limit == "data messages"


def test_tables_and_unknown_names(two):
    assert "→" in str(two["time"]) and "one card" in two["time"].table()._repr_html_()
    with pytest.raises(KeyError, match="there are .*tensor 2"):
        two["time"].row("data 3")
    with pytest.raises(ValueError, match="goal='money' is not known"):
        choose(MINI, Machines("T4"), "money")
    with pytest.raises(ValueError, match="The T4 has no bf16"):
        choose(replace(MINI, precision="bf16"), Machines("T4"))


def test_what_the_planner_refuses_is_left_out_with_its_reason():
    found = choose(replace(MINI, precision="fp16"), Machines("T4", 2))
    assert {row.name for row in found.rows} == {"one card", "data 2"} and "gradients overflow" in found.left_out["data 2, ZeRO-1"]
    odd = choose(replace(MINI, batch_size=3), Machines("T4", 2))
    assert "cannot be shared evenly" in odd.left_out["data 2"] and odd.row("tensor 2").fit
    with patch.object(room, "layouts", lambda *some: [(MINI, Parallel(tensor=8), False)]):
        heads = choose(MINI, Machines("T4", 8))
    assert "4 attention heads cannot be divided by 8" in heads.left_out["tensor 8"]


def test_one_card_that_is_too_small():
    whole, fine = plan(MINI).peak, plan(replace(MINI, accumulation=8)).peak
    found = choose(MINI, Machines(tiny((whole + fine) // 2)))
    names = [row.name for row in found.rows]
    assert found.best.fit and found.best.same and not found.row("one card").fit
    assert found.row("one card").limit == "memory: activations" and "Too much by" in found.row("one card").reason
    fitting = [row.same for row in found.rows if row.fit]
    assert fitting == sorted(fitting, reverse=True) and False in fitting  # what learns the same comes first
    assert {"one card, accumulation 8", "one card, checkpointing", "one card, states off the card", "one card, lora_rank 8"} <= set(names)


def test_states_off_the_card():
    made = plan(MINI)
    assert choices.stage(made).without_states == int((made.timeline.sum(axis=1) - made.timeline[:, 2]).max())
    row = Row(MINI, Machines("T4"), choices.planned(MINI), offload=True)
    on = Row(MINI, Machines("T4"), choices.planned(MINI))
    assert row.peak < on.peak and row.fit.need < on.fit.need
    assert row.time.exposed["host"] == pytest.approx(2 * 4 * made.parameters / LINKS["PCIe 3 x16"].speed, rel=0.01)  # and 512-byte blocks


def test_nothing_fits():
    found = choose(MINI, Machines(tiny(1 * MIB)))
    assert found.best is None and not any(row.fit for row in found.rows)
    over = [row.fit.over for row in found.rows]
    assert over == sorted(over)


def test_a_bound_never_hides_the_best():
    card = tiny(10 * MIB)
    for goal, park in itertools.product(("time", "memory"), (Machines(T4, 2), Machines(card, 2))):
        with patch.object(choices, "is_kept", lambda *some: False):
            quick = choose(MINI, park, goal)
        with patch.object(room, "hopeless", lambda *some: None):
            full = choose(MINI, park, goal)
        assert quick.best.name == full.best.name
        fits = {row.name for row in full.rows if row.fit}
        assert {name for name in quick.left_out if name in fits and goal == "memory"} == set()


def test_hopeless_says_why():
    park, alone = Machines(tiny(MIB // 2), 2), choices.planned(MINI)
    small = Machines(Card("T4", MIB, T4.capability), 2)
    assert "Weights, gradients and states alone are" in hopeless(MINI, Parallel(data=2), small, alone, [], "memory")
    fast = [Row(MINI, Machines("H200"), alone)]
    assert "Its work and bubble alone take" in hopeless(MINI, Parallel(data=2), Machines(T4, 2), alone, fast, "time")
    assert hopeless(MINI, Parallel(data=2), Machines(T4, 2), alone, fast, "memory") is None and park.cards == 2


def test_spans():
    assert [span(value) for value in (2.5, 0.1234, 0.000494)] == ["2.5 s", "123 ms", "0.494 ms"]


# -- what is kept --------------------------------------------------------------------------------------------

def test_notebook_18_finds_every_plan_kept():
    with patch.object(choices, "make", side_effect=AssertionError("a plan that is not kept")):
        for job, machines in SCENARIOS.values():
            for goal in room.GOALS:
                assert choose(job, machines, goal).best.fit
        for recipe in toggled():
            choices.planned(recipe)


def test_packed_and_unpacked():
    stages = choices.make(choices._shape(MINI), Parallel(pipeline=2))
    packed = choices.pack(choices._shape(MINI), Parallel(pipeline=2), stages)
    assert choices.unpack(packed) == (choices._shape(MINI), Parallel(pipeline=2), stages)


KEPT = choices.read()
SAMPLE = [row for row in KEPT if len(row["stages"]) == 1][::25] + [row for row in KEPT if row["recipe"].get("profile") != "full"]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: f"{row['recipe']} {row['parallel']}"[:90])
def test_kept_plans_are_those_of_today(row):
    recipe, parallel, stages = choices.unpack(row)
    assert choices.make(recipe, parallel) == stages

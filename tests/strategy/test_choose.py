"""The choice of a strategy: what is ranked, what is left out and why, and the plans that are kept for it."""

import itertools
from unittest.mock import patch

import pytest

from helpers.gpus import CONTEXT, GPU, find
from helpers.parallel import Parallel
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from helpers.strategy import choose as room
from helpers.strategy import plan_cache
from helpers.strategy.choose import SCENARIOS, choose, hopeless, toggled
from helpers.strategy.cluster import Candidate, Cluster, span
from helpers.strategy.plan_ranks import plan_parallel
from helpers.strategy.step_time import LINKS, Link
from helpers.units import MIB

MINI = Recipe("vit", batch_size=32)
T4 = find("T4")


def tiny(room_for: int) -> GPU:
    """A T4 with so many bytes for tensors."""
    return GPU("T4", CONTEXT + int(16.25 * MIB) + int(room_for * 1.05) + 2, T4.capability)


# -- machines ------------------------------------------------------------------------------------------------


def test_an_axis_pays_the_link_that_its_ranks_reach():
    park = Cluster("A100-40GB", 8, machines=2, inside="NVLink 3", between="Ethernet 10 Gbit")
    inside, between = LINKS["NVLink 3"], LINKS["Ethernet 10 Gbit"]
    assert park.links(Parallel(data=16))["data"] == between
    assert set(park.links(Parallel(data=8)).values()) == {inside}
    shared = park.links(Parallel(data=2, tensor=8))
    assert (
        shared["tensor"] == inside
        and shared["data"].speed == between.speed / 8
        and "shared by 8" in shared["data"].name
    )
    staged = park.links(Parallel(data=8, pipeline=2))
    assert staged["data"] == inside and staged["pipeline"].speed == between.speed / 8
    assert park.links(Parallel(data=4, tensor=2))["data"] == inside
    assert (
        park.links(Parallel(data=1, pipeline=16))["pipeline"].speed == between.speed
    )  # one line from machine to machine


def test_links_agree_with_the_ranks_counted_one_by_one():
    for data, pipeline, tensor, per_machine in itertools.product(
        (1, 2, 3, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)
    ):
        if per_machine % tensor:
            continue
        parallel = Parallel(data=data, pipeline=pipeline, tensor=tensor)
        park = Cluster(
            "T4",
            per_machine,
            machines=-(-parallel.ranks // per_machine),
            inside=Link("in", 9e9, 0),
            between=Link("out", 1e9, 0),
        )
        number = {
            (p, d, t): (p * data + d) * tensor + t
            for p in range(pipeline)
            for d in range(data)
            for t in range(tensor)
        }
        leaves = {"tensor": False, "data": False, "pipeline": False}
        for one, other in itertools.combinations(number, 2):
            apart = [
                axis for axis, a, b in zip(("pipeline", "data", "tensor"), one, other) if a != b
            ]
            if len(apart) == 1 and number[one] // per_machine != number[other] // per_machine:
                leaves[apart[0]] = True
        found = park.links(parallel)
        for axis, out in leaves.items():
            if getattr(parallel, axis) > 1 and park.cluster > 1:
                assert (found[axis].speed < 9e9) >= out, (parallel, per_machine, axis)
                if parallel.ranks % per_machine == 0 and (
                    per_machine % (tensor * data) == 0 or (tensor * data) % per_machine == 0
                ):
                    assert (found[axis].speed < 9e9) == out, (parallel, per_machine, axis)


def test_bad_machines():
    with pytest.raises(ValueError, match="gpu='K80' is not known"):
        Cluster("K80")
    with pytest.raises(ValueError, match="link='string' is not known"):
        Cluster("T4", inside="string")
    with pytest.raises(ValueError, match="machines=0 must be a whole number"):
        Cluster("T4", machines=0)
    with pytest.raises(ValueError, match="more than one machine of 2"):
        Cluster("T4", 2, machines=2).links(Parallel(tensor=4))


# -- choices -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two():
    return {goal: choose(MINI, Cluster("T4", 2), goal) for goal in room.GOALS}


def test_every_goal_ranks_by_its_own(two):
    rows = {
        goal: [row for row in found.candidates if row.fit and row.same]
        for goal, found in two.items()
    }
    assert (
        all(row.fit for row in two["time"].candidates)
        and len(two["time"].candidates) == 7
        and not two["time"].left_out
    )
    assert [row.time.total for row in rows["time"]] == sorted(
        row.time.total for row in rows["time"]
    )
    assert [row.peak for row in rows["memory"]] == sorted(row.peak for row in rows["memory"])
    assert [row.changes for row in rows["simplest"]] == sorted(
        row.changes for row in rows["simplest"]
    )
    assert two["simplest"].best.name == "one card" and two["simplest"].best.changes == 0


def test_a_row_is_its_plan(two):
    row = two["time"].candidate("data 2, ZeRO-1")
    made = plan_parallel(MINI, Parallel(data=2, zero_stage=1))
    assert (row.peak, row.plan.bytes_by_collective) == (made.peak, made.bytes_by_collective)
    assert row.time == made.seconds("T4", "PCIe 3 x16") and row.fit.terms == made.fits("T4").terms
    assert row.rows_per_second == pytest.approx(32 / row.time.total)
    assert (
        f"{row.time.compute / row.time.total:.0%} of the step is work" in row.reason
        and row.limit == "data messages"
    )


def test_tables_and_unknown_names(two):
    assert "→" in str(two["time"]) and "one card" in two["time"].table()._repr_html_()
    with pytest.raises(KeyError, match="there are .*tensor 2"):
        two["time"].candidate("data 3")
    with pytest.raises(ValueError, match="goal='money' is not known"):
        choose(MINI, Cluster("T4"), "money")
    with pytest.raises(ValueError, match="The T4 has no bf16"):
        choose(replace(MINI, precision="bf16"), Cluster("T4"))


def test_what_the_planner_refuses_is_left_out_with_its_reason():
    found = choose(replace(MINI, precision="fp16"), Cluster("T4", 2))
    assert {row.name for row in found.candidates} == {
        "one card",
        "data 2",
    } and "gradients overflow" in found.left_out["data 2, ZeRO-1"]
    odd = choose(replace(MINI, batch_size=3), Cluster("T4", 2))
    assert "cannot be shared evenly" in odd.left_out["data 2"] and odd.candidate("tensor 2").fit
    with patch.object(room, "layouts", lambda *some: [(MINI, Parallel(tensor=8), False)]):
        heads = choose(MINI, Cluster("T4", 8))
    assert "4 attention heads cannot be divided by 8" in heads.left_out["tensor 8"]


def test_one_card_that_is_too_small():
    whole, fine = plan(MINI).peak, plan(replace(MINI, accumulation=8)).peak
    found = choose(MINI, Cluster(tiny((whole + fine) // 2)))
    names = [row.name for row in found.candidates]
    assert found.best.fit and found.best.same and not found.candidate("one card").fit
    assert (
        found.candidate("one card").limit == "memory: activations"
        and "Too much by" in found.candidate("one card").reason
    )
    fitting = [row.same for row in found.candidates if row.fit]
    assert (
        fitting == sorted(fitting, reverse=True) and False in fitting
    )  # what learns the same comes first
    assert {
        "one card, accumulation 8",
        "one card, checkpointing",
        "one card, states off the card",
        "one card, lora_rank 8",
    } <= set(names)


def test_states_off_the_card():
    made = plan(MINI)
    assert plan_cache.stage(made).without_states == int(
        (made.timeline.sum(axis=1) - made.timeline[:, 2]).max()
    )
    row = Candidate(MINI, Cluster("T4"), plan_cache.planned(MINI), offload=True)
    on = Candidate(MINI, Cluster("T4"), plan_cache.planned(MINI))
    assert row.peak < on.peak and row.fit.need < on.fit.need
    assert row.time.exposed["host"] == pytest.approx(
        2 * 4 * made.parameters / LINKS["PCIe 3 x16"].speed, rel=0.01
    )  # and 512-byte blocks


def test_nothing_fits():
    found = choose(MINI, Cluster(tiny(1 * MIB)))
    assert found.best is None and not any(row.fit for row in found.candidates)
    over = [row.fit.over for row in found.candidates]
    assert over == sorted(over)


def test_a_bound_never_hides_the_best():
    gpu = tiny(10 * MIB)
    for goal, park in itertools.product(("time", "memory"), (Cluster(T4, 2), Cluster(gpu, 2))):
        with patch.object(plan_cache, "is_kept", lambda *some: False):
            quick = choose(MINI, park, goal)
        with patch.object(room, "hopeless", lambda *some: None):
            full = choose(MINI, park, goal)
        assert quick.best.name == full.best.name
        fits = {row.name for row in full.candidates if row.fit}
        assert {name for name in quick.left_out if name in fits and goal == "memory"} == set()


def test_hopeless_says_why():
    park, alone = Cluster(tiny(MIB // 2), 2), plan_cache.planned(MINI)
    small = Cluster(GPU("T4", MIB, T4.capability), 2)
    assert "Weights, gradients and states alone are" in hopeless(
        MINI, Parallel(data=2), small, alone, [], "memory"
    )
    fast = [Candidate(MINI, Cluster("H200"), alone)]
    assert "Its work and bubble alone take" in hopeless(
        MINI, Parallel(data=2), Cluster(T4, 2), alone, fast, "time"
    )
    assert (
        hopeless(MINI, Parallel(data=2), Cluster(T4, 2), alone, fast, "memory") is None
        and park.gpus == 2
    )


def test_spans():
    assert [span(value) for value in (2.5, 0.1234, 0.000494)] == ["2.5 s", "123 ms", "0.494 ms"]


# -- what is kept --------------------------------------------------------------------------------------------


def test_notebook_18_finds_every_plan_kept():
    with patch.object(plan_cache, "make", side_effect=AssertionError("a plan that is not kept")):
        for job, machines in SCENARIOS.values():
            for goal in room.GOALS:
                assert choose(job, machines, goal).best.fit
        for recipe in toggled():
            plan_cache.planned(recipe)


def test_packed_and_unpacked():
    stages = plan_cache.make(plan_cache._shape(MINI), Parallel(pipeline=2))
    packed = plan_cache.pack(plan_cache._shape(MINI), Parallel(pipeline=2), stages)
    assert plan_cache.unpack(packed) == (plan_cache._shape(MINI), Parallel(pipeline=2), stages)


KEPT = plan_cache.read()
SAMPLE = [row for row in KEPT if len(row["stages"]) == 1][::25] + [
    row for row in KEPT if row["recipe"].get("profile") != "full"
]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: f"{row['recipe']} {row['parallel']}"[:90])
def test_kept_plans_are_those_of_today(row):
    recipe, parallel, stages = plan_cache.unpack(row)
    assert plan_cache.make(recipe, parallel) == stages

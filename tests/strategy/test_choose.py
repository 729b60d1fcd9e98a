"""The choice of a strategy: what is ranked, and what is left out and why."""

from unittest.mock import patch

import pytest

from helpers.parallel import Parallel
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from helpers.strategy import choose as choose_module
from helpers.strategy import plan_cache
from helpers.strategy.candidate import Candidate
from helpers.strategy.candidates import Attempt, accumulations, hopeless
from helpers.strategy.choose import GOALS, Choice, choose, ranked
from helpers.strategy.plan_ranks import plan_parallel
from tight_fit.gpus import CONTEXT, GPU, find
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.seconds import LINKS, StepTime
from tight_fit.search.space import TIE
from tight_fit.units import MIB

MINI = Recipe("vit", batch_size=32)
T4 = find("T4")


def tiny(room_for: int) -> GPU:
    """A T4 with so many bytes for tensors."""
    return GPU("T4", CONTEXT + int(16.25 * MIB) + int(room_for * 1.05) + 2, T4.capability)


@pytest.fixture(scope="module")
def two():
    return {goal: choose(MINI, Cluster("T4", 2), goal) for goal in GOALS}


def test_every_goal_ranks_by_its_own(two):
    rows = {
        goal: [candidate for candidate in choice.candidates if candidate.fit and candidate.same]
        for goal, choice in two.items()
    }
    assert (
        all(candidate.fit for candidate in two["time"].candidates)
        and len(two["time"].candidates) == 8
        and not two["time"].left_out
    )
    ties = len(two["time"].ties) + 1  # among them counts the number of changes
    later = [candidate.time.total for candidate in rows["time"][ties:]]
    assert later == sorted(later)
    fastest = min(candidate.time.total for candidate in rows["time"])
    first = [candidate.changes for candidate in rows["time"][:ties]]
    assert first == sorted(first) and later[0] > (1 + TIE) * fastest
    assert rows["time"][ties - 1].time.total <= (1 + TIE) * fastest
    assert [candidate.peak for candidate in rows["memory"]] == sorted(
        candidate.peak for candidate in rows["memory"]
    )
    assert [candidate.changes for candidate in rows["simplest"]] == sorted(
        candidate.changes for candidate in rows["simplest"]
    )
    assert two["simplest"].best.name == "one GPU" and two["simplest"].best.changes == 0


def test_a_candidate_is_its_plan(two):
    candidate = two["time"].candidate("data 2, ZeRO-1")
    planned = plan_parallel(MINI, Parallel(data=2, zero_stage=1))
    assert (candidate.peak, candidate.plan.bytes_by_collective) == (
        planned.peak,
        planned.bytes_by_collective,
    )
    assert (
        candidate.time == planned.seconds("T4", "PCIe 3 x16")
        and candidate.fit.terms == planned.fits("T4").terms
    )
    assert candidate.examples_per_second == pytest.approx(32 / candidate.time.total)
    assert (
        f"{candidate.time.compute / candidate.time.total:.0%} of the step is work"
        in candidate.reason
        and candidate.limit == "compute"  # so small a step waits for its launches
    )


def test_layouts_are_compared_with_as_many_examples_at_once():
    """For memory, no GPU has more at once than with data ranks alone; for time, what fits first."""
    job, layout = replace(MINI, batch_size=64), Parallel(data=2, tensor=4)
    assert accumulations(job, layout, "memory") == [4, 8, 16, 32]
    assert accumulations(job, layout, "time") == [1, 2, 4, 8, 16, 32]
    assert accumulations(job, Parallel(data=8), "memory") == [1, 2, 4, 8]
    assert accumulations(job, Parallel(pipeline=4), "time") == [4, 8]
    assert accumulations(replace(job, accumulation=2), Parallel(data=8)) == [2, 4, 8]
    assert accumulations(replace(MINI, batch_size=3), Parallel(data=2)) == [1]
    memory = choose(MINI, Cluster("T4", 2), "memory")
    assert {
        candidate.plan.recipe.accumulation
        for candidate in memory.candidates
        if candidate.parallel == Parallel(tensor=2)
    } == {2}


def test_what_ties_with_the_fastest_is_said():
    plans = [plan_cache.planned(MINI), plan_cache.planned(MINI, Parallel(tensor=2))]
    cluster = Cluster("T4", 2)
    simple, other = (Candidate(MINI, cluster, planned) for planned in plans)
    for candidate, total in ((simple, 1.04), (other, 1.0)):
        candidate.__dict__["time"] = StepTime(total, 0.0)
    choice = Choice(MINI, cluster, "time", ranked([other, simple], "time"))
    assert choice.best is simple and choice.ties == [other]
    assert "≈" in str(choice) and "within 5% of the fastest, the simplest first" in str(choice)
    simple.__dict__["time"] = StepTime(1.06, 0.0)
    choice = Choice(MINI, cluster, "time", ranked([other, simple], "time"))
    assert choice.best is other and not choice.ties and "≈" not in str(choice)


def test_the_answer_names_the_best_and_why_the_runner_up_lost(two):
    for choice in two.values():
        best, second = choice.best, choice.runner_up
        assert second.fit and second.parallel != best.parallel
        assert choice.candidates.index(second) > 0
        assert choice.answer.startswith(f"Take {best.name}: each GPU needs ")
        assert best.reason in choice.answer and f"The runner-up is {second.name} (" in choice.answer
    assert "no simpler" in two["simplest"].answer or "more of the job" in two["simplest"].answer
    memory = two["memory"]
    assert memory.runner_up.peak >= memory.best.peak and "in place of" in memory.answer


def test_the_answer_where_two_tie_one_is_slower_and_nothing_fits():
    plans = [plan_cache.planned(MINI), plan_cache.planned(MINI, Parallel(tensor=2))]
    cluster = Cluster("T4", 2)
    for total, says in (
        (1.04, "within the 5% that a plan"),
        (1.2, "it is 20.0% slower; fits with"),
    ):
        one, other = (Candidate(MINI, cluster, planned) for planned in plans)
        one.__dict__["time"], other.__dict__["time"] = StepTime(1.0, 0.0), StepTime(total, 0.0)
        assert says in Choice(MINI, cluster, "time", ranked([other, one], "time")).answer
    alone = Choice(MINI, cluster, "time", [one])
    assert alone.runner_up is None and "Nothing else" in alone.answer
    small = Candidate(MINI, Cluster(tiny(0), 2), plans[0])
    answer = Choice(MINI, small.cluster, "time", [small]).answer
    assert answer.startswith("Nothing fits") and "Too much by" in answer


def test_tables_and_unknown_names(two):
    assert "→" in str(two["time"]) and "one GPU" in two["time"].table()._repr_html_()
    with pytest.raises(KeyError, match="there are .*tensor 2"):
        two["time"].candidate("data 3")
    with pytest.raises(ValueError, match="goal='money' is not known"):
        choose(MINI, Cluster("T4"), "money")
    with pytest.raises(ValueError, match="The T4 has no bf16"):
        choose(replace(MINI, precision="bf16"), Cluster("T4"))


def test_what_the_planner_refuses_is_left_out_with_its_reason():
    choice = choose(replace(MINI, precision="fp16"), Cluster("T4", 2))
    assert {candidate.name for candidate in choice.candidates} == {
        "one GPU",
        "data 2",
    } and "gradients overflow" in choice.left_out["data 2, ZeRO-1"]
    odd = choose(replace(MINI, batch_size=3), Cluster("T4", 2))
    assert "cannot be divided evenly" in odd.left_out["data 2"] and odd.candidate("tensor 2").fit
    attempts = [Attempt({}, Parallel(tensor=8))]
    with patch.object(choose_module, "layouts", lambda *_: attempts):
        heads = choose(MINI, Cluster("T4", 8))
    assert "4 attention heads cannot be divided by 8" in heads.left_out["tensor 8"]


def test_one_gpu_that_is_too_small():
    whole, fine = plan(MINI).peak, plan(replace(MINI, accumulation=8)).peak
    choice = choose(MINI, Cluster(tiny((whole + fine) // 2)))
    names = [candidate.name for candidate in choice.candidates]
    assert choice.best.fit and choice.best.same and not choice.candidate("one GPU").fit
    assert (
        choice.candidate("one GPU").limit == "memory: activations"
        and "Too much by" in choice.candidate("one GPU").reason
    )
    fitting = [candidate.same for candidate in choice.candidates if candidate.fit]
    assert (
        fitting == sorted(fitting, reverse=True) and False in fitting
    )  # what learns the same comes first
    assert {
        "one GPU, accumulation 8",
        "one GPU, checkpointing",
        "one GPU, states off the GPU",
        "one GPU, lora_rank 8",
    } <= set(names)


def test_states_off_the_gpu():
    planned = plan_cache.planned(MINI)
    off = Candidate(MINI, Cluster("T4"), planned, offload=True)
    on = Candidate(MINI, Cluster("T4"), planned)
    assert off.peak < on.peak and off.fit.need < on.fit.need
    # Gradients out and weights back: 4 bytes per parameter each, and a little for blocks of 512.
    moved = 2 * 4 * planned.fullest.parameters
    assert off.time.exposed["host"] == pytest.approx(moved / LINKS["PCIe 3 x16"].speed, rel=0.01)


def test_nothing_fits():
    choice = choose(MINI, Cluster(tiny(1 * MIB)))
    assert choice.best is None and not any(candidate.fit for candidate in choice.candidates)
    over = [candidate.fit.over for candidate in choice.candidates]
    assert over == sorted(over)


def test_a_bound_never_hides_the_best():
    gpu, small = tiny(8 * MIB), replace(MINI, batch_size=8)
    for goal, cluster in (("time", Cluster(T4, 2)), ("memory", Cluster(gpu, 2))):
        with patch.object(plan_cache, "is_kept", lambda *_: False):
            quick = choose(small, cluster, goal)
        with patch.object(choose_module, "hopeless", lambda *_: None):
            full = choose(small, cluster, goal)
        assert quick.best.name == full.best.name
        fits = {candidate.name for candidate in full.candidates if candidate.fit}
        assert {name for name in quick.left_out if name in fits and goal == "memory"} == set()


def test_hopeless_says_why():
    cluster, alone = Cluster(tiny(MIB // 2), 2), plan_cache.planned(MINI)
    small = Cluster(GPU("T4", MIB, T4.capability), 2)
    assert "Weights, gradients and states alone are" in hopeless(
        MINI, Parallel(data=2), small, alone, [], "memory"
    )
    fast = [Candidate(MINI, Cluster("H200"), alone)]
    fast[0].__dict__["time"] = StepTime(1e-5, 0.0)
    assert "At the GPUs' peak its work and bubble alone take" in hopeless(
        MINI, Parallel(data=2), Cluster(T4, 2), alone, fast, "time"
    )
    assert (
        hopeless(MINI, Parallel(data=2), Cluster(T4, 2), alone, fast, "memory") is None
        and cluster.gpus == 2
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"offload": "optimizer"},
        {"optimizer_in_backward": True, "max_grad_norm": None},
        {"base": "bf16", "lora_rank": 8},
    ],
    ids=str,
)
def test_sixteen_bytes_per_parameter_are_asked_only_of_recipes_that_have_them(fields):
    """What makes weights, gradients or states smaller is planned, not judged by that arithmetic."""
    recipe, cluster = replace(MINI, **fields), Cluster(GPU("T4", MIB, T4.capability))
    alone = plan_cache.planned(MINI)
    assert hopeless(MINI, Parallel(), cluster, alone, [], "time")
    assert hopeless(recipe, Parallel(), cluster, alone, [], "time") is None
    assert hopeless(MINI, Parallel(), cluster, alone, [], "time", offload=True) is None


def test_a_change_that_the_job_does_not_allow_is_left_out_with_its_reason():
    job = replace(MINI, optimizer_in_backward=True, max_grad_norm=None)
    choice = choose(job, Cluster(tiny(MIB)))
    assert choice.best is None and choice.candidates
    assert any("accumulation" in name for name in choice.left_out)
    assert any("optimizer_in_backward" in why for why in choice.left_out.values())

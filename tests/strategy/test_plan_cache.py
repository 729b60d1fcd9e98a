"""The kept plans: what the files hold is what is planned today, and all that notebooks ask for."""

from pathlib import Path
from unittest.mock import patch

import pytest

from helpers.parallel import Parallel
from helpers.plan import plan
from helpers.recipe import Recipe
from helpers.strategy import __main__ as command
from helpers.strategy import choose, ladder, plan_cache, techniques
from helpers.strategy.plan_cache import PlanCache
from helpers.strategy.plan_summary import by_last_use, peak_without_states, summarize
from tight_fit.layouts.messages import SentMessage

ROOT = Path(__file__).resolve().parents[2]
MINI = Recipe("vit", batch_size=32)
KEPT = {path.stem: plan_cache.read(path) for path in sorted(plan_cache.FOLDER.glob("*.json"))}
# A plan of several ranks takes many seconds. Files are written at once, and what makes them stale
# changes more than one plan, so a sample is planned anew.
ALONE = {
    name: [(key, ranks) for key, ranks in plans.items() if key[1] == plan_cache.ALONE]
    for name, plans in KEPT.items()
}
SAMPLE = [
    *ALONE["layouts"][::25],
    *ALONE["ladder"][::8],
    *ALONE["techniques"][::9],
    *[(key, ranks) for key, ranks in KEPT["layouts"].items() if key[0].profile != "full"],
]


def test_each_group_of_plans_has_its_file():
    assert set(KEPT) == set(command.GROUPS) and all(KEPT.values())


@pytest.mark.night
@pytest.mark.parametrize(
    "key, ranks", SAMPLE, ids=lambda value: f"{value[0]} {value[1]}"[:90] if len(value) == 2 else ""
)
def test_kept_plans_are_those_of_today(key, ranks):
    made = plan_cache.make(*key)
    assert made == ranks, "stale: make plans"
    for new, old in zip(made, ranks):
        assert old.packed is None or new.packed == old.packed, "stale: make plans"


def test_a_plan_that_two_files_hold_is_the_same_in_both():
    plans: dict = {}
    for kept in KEPT.values():
        for key, ranks in kept.items():
            assert plans.setdefault(key, ranks) == ranks


def test_notebooks_and_readme_find_every_plan_kept():
    with patch.object(plan_cache, "make", side_effect=AssertionError("a plan that is not kept")):
        for job, cluster in choose.SCENARIOS.values():
            for goal in choose.GOALS:
                assert choose.choose(job, cluster, goal).best.fit
        for recipe in choose.toggled():
            plan_cache.planned(recipe)
        plan_cache.planned(*choose.TWO_T4)
        ladder.plan_everything()
        assert len(techniques.table("precision").frame) == len(techniques.TECHNIQUES)


def test_written_and_read_again(tmp_path):
    layout = Parallel(pipeline=2)
    cache = PlanCache(tmp_path)
    key = plan_cache.plan_key(MINI), layout
    ranks = plan_cache.make(*key)
    assert cache.find(key) is None
    cache.add(key, ranks)
    path = cache.write("mine")
    assert PlanCache(tmp_path).find(key) == ranks
    assert plan_cache.read(path) == {key: ranks}
    assert max(map(len, path.read_text().splitlines())) <= plan_cache.WIDTH
    cache.forget()
    assert cache.find(key) is None


def test_equal_messages_are_kept_once_in_the_order_of_the_last_micro_batch():
    first, layer = (SentMessage("all_gather", size, 2, "data", "forward") for size in (9, 5))
    assert by_last_use([first, layer, layer, first, layer]) == (first, first, layer, layer, layer)
    last = SentMessage("reduce_scatter", 5, 2, "data", "backward")
    summary = summarize(MINI, plan(MINI), [last, first, last])
    assert summary.sent == (first, last, last)
    assert [group["count"] for group in summary.to_dict()["sent"]] == [1, 2]


def test_a_summary_says_what_its_plan_says():
    planned = plan(MINI)
    summary = plan_cache.planned_alone(MINI)
    for name in ("recipe", "peak", "at_peak", "peak_phase", "flops", "parameters", "overhead"):
        assert getattr(summary, name) == getattr(planned, name), name
    assert summary.fits("T4").terms == planned.fits("T4").terms
    assert summary.gradients == planned.highest["gradients"]
    assert summary.without_states == peak_without_states(planned) < planned.peak


def test_what_is_kept_without_its_operations_is_planned_when_its_time_is_asked_for():
    planned = plan(MINI)
    bytes_only = summarize(MINI, planned, timed=False)
    assert bytes_only == summarize(MINI, planned) and "packed" not in bytes_only.to_dict()
    assert bytes_only.seconds("T4").total == planned.seconds("T4").total
    rank = summarize(MINI, planned, [SentMessage("send", 5, 2, "pipeline", "forward")], timed=False)
    with pytest.raises(ValueError, match="run `make plans`"):
        rank.seconds("T4")


def test_the_command_explains_itself_and_refuses_other_groups(capsys):
    with patch.object(plan_cache, "make", side_effect=AssertionError("nothing may be planned")):
        for arguments, status in ((["--help"], 0), (["layout"], 2)):
            with pytest.raises(SystemExit) as stopped:
                command.main(arguments)
            assert stopped.value.code == status
    shown = capsys.readouterr()
    assert "plans/" in shown.out and "use layouts, ladder, techniques, " in shown.err

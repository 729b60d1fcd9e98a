"""The kept plans: what the files hold is what is planned today, and all that notebooks ask for."""

from pathlib import Path
from unittest.mock import patch

import pytest

from helpers import show
from helpers.plan import __main__ as command
from helpers.plan import ladder, plan, plan_cache, techniques
from helpers.plan.plan_cache import PlanCache
from helpers.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
MINI = Recipe("vit", batch_size=32)
KEPT = {name: plan_cache.read(plan_cache.FOLDER / f"{name}.json") for name in plan_cache.FILES}
# Files are written at once, and what makes them stale changes more than one plan, so a sample is
# planned anew.
SAMPLE = [*[*KEPT["ladder"].items()][::8], *[*KEPT["techniques"].items()][::9]]


def test_each_group_of_plans_has_its_file():
    files = {path.stem for path in plan_cache.FOLDER.iterdir()}
    assert files == set(command.GROUPS) and all(KEPT.values())


@pytest.mark.night
@pytest.mark.parametrize("key, summary", SAMPLE, ids=lambda value: str(value)[:90])
def test_kept_plans_are_those_of_today(key, summary):
    made = plan_cache.make(key)
    assert made == summary and made.packed == summary.packed, "stale: make plans"


def test_a_plan_that_two_files_hold_is_the_same_in_both():
    plans: dict = {}
    for kept in KEPT.values():
        for key, ranks in kept.items():
            assert plans.setdefault(key, ranks) == ranks


def test_notebooks_and_readme_find_every_plan_kept():
    with patch.object(plan_cache, "make", side_effect=AssertionError("a plan that is not kept")):
        ladder.plan_everything()
        assert len(show.techniques("precision").frame) == len(techniques.TECHNIQUES)


def test_written_and_read_again(tmp_path):
    cache, key = PlanCache(tmp_path), plan_cache.plan_key(MINI)
    summary = plan_cache.make(key)
    assert cache.find(key) is None
    cache.add(key, summary)
    path = cache.write(plan_cache.FILES[0])
    assert PlanCache(tmp_path).find(key) == summary
    assert plan_cache.read(path) == {key: summary}
    assert plan_cache.read(path)[key].packed == summary.packed
    cache.forget()
    assert cache.find(key) is None


def test_a_summary_says_what_its_plan_says():
    planned = plan(MINI)
    summary = plan_cache.planned(MINI)
    for name in ("recipe", "peak", "at_peak", "peak_phase", "flops", "parameters", "overhead"):
        assert getattr(summary, name) == getattr(planned, name), name
    assert summary.fits("T4").terms == planned.fits("T4").terms
    assert summary.seconds("T4").total == planned.seconds("T4").total


def test_the_command_explains_itself_and_refuses_other_groups(capsys):
    with patch.object(plan_cache, "make", side_effect=AssertionError("nothing may be planned")):
        for arguments, status in ((["--help"], 0), (["layout"], 2)):
            with pytest.raises(SystemExit) as stopped:
                command.main(arguments)
            assert stopped.value.code == status
    shown = capsys.readouterr()
    assert "plans/" in shown.out and "use ladder, techniques, " in shown.err

"""What a lesson shows of a kept sweep follows from its runs, and a sweep is shown when finished.

The expected values are computed from the JSON text, with pandas and SciPy.
"""

import json
import re

import nbformat
import pandas as pd
import pytest
import scipy.stats

from benchmarks.sweeps import results
from benchmarks.sweeps.stages import write
from helpers import sweeps
from helpers.recipe import Recipe
from tools import course

KEPT = results.names()


def best_of(runs):
    """The rate with the highest mean validation accuracy among those with five seeds or more."""
    by_rate = runs.groupby("learning_rate").validation.agg(["mean", "count"])
    return by_rate[by_rate["count"] >= 5]["mean"].idxmax()


@pytest.fixture(scope="module", params=KEPT)
def kept(request):
    """(a sweep's name, its JSON values, its runs, {arm: those with its own number of steps})"""
    text = (results.FOLDER / f"{request.param}.json").read_text(encoding="utf8")
    values = json.loads(text)
    runs, arms = pd.DataFrame(values["runs"]), {}
    for arm in values["arms"]:
        steps = arm["fields"].get("steps", values["base"]["steps"])
        arms[arm["name"]] = runs[(runs.arm == arm["name"]) & (runs.steps == steps)]
    return request.param, values, runs, arms


def test_every_best_learning_rate_is_inside_its_grid_and_has_five_seeds(kept):
    for arm, runs in kept[-1].items():
        best = best_of(runs)
        around = runs[runs.learning_rate.isin([best / 2, best, best * 2])]
        counts = around.groupby("learning_rate").seed.nunique()
        assert len(counts) == 3 and counts.min() >= 5, (arm, counts)
        assert not runs.duplicated(["learning_rate", "seed"]).any()
        first = runs[runs.seed < 2].groupby("learning_rate").validation.mean()
        assert min(first.index) < first.idxmax() < max(first.index), (arm, first)


def test_the_table_is_what_the_runs_give(kept):
    name, values, _, arms = kept
    test = {
        arm: runs[runs.learning_rate == best_of(runs)].set_index("seed").accuracy.sort_index() * 100
        for arm, runs in arms.items()
    }
    against = {arm["name"]: arm["against"] for arm in values["arms"]}
    frame = sweeps.table(name).frame.set_index("arm")
    short = sweeps.short(name).frame.set_index("trained")
    for number, (arm, runs) in enumerate(arms.items()):
        row, scores = frame.loc[arm], test[arm]
        assert row["accuracy"] == f"{scores.mean():.1f}% ± {scores.std(ddof=1):.1f}"
        assert float(row["best learning rate"]) == pytest.approx(best_of(runs), rel=0.05)
        assert int(row["seeds"]) == len(scores) >= 5
        if number:
            pairs = (scores - test[against[arm] or next(iter(arms))]).dropna()
            half = scipy.stats.t.ppf(0.975, len(pairs) - 1) * scipy.stats.sem(pairs)
            low, high = pairs.mean() - half, pairs.mean() + half
            shown = [float(text) for text in re.findall(r"[-+]?\d+\.\d+", row["difference"])]
            assert shown == pytest.approx([pairs.mean(), low, high], abs=0.051)
            difference = short.loc[arm]["difference"]
            assert difference.startswith(f"{shown[0]:+.1f}, ")
            assert ("not sure" in difference) == (low <= 0 <= high)
    assert values["note"] in sweeps.table(name).caption
    assert all(arm in sweeps.figure(name).alt for arm in arms)
    for label, accuracy in values["references"].items():
        assert frame.loc[label]["accuracy"] == f"{accuracy:.1%}"


def test_twice_the_steps_is_the_same_arm_rate_and_seeds(kept):
    name, _, everything, arms = kept
    sweep = results.read(name)
    for arm, runs in arms.items():
        longer = everything[(everything.arm == arm) & (everything.steps == 2 * sweep.steps(arm))]
        gain = sweep.gain_of_twice_the_steps(arm)
        if gain is None:
            assert len(longer) < 2
            continue
        once, twice = (
            of[of.learning_rate == best_of(runs)].set_index("seed").accuracy
            for of in (runs, longer)
        )
        assert gain.mean == pytest.approx((twice - once).dropna().mean())


def test_notebooks_were_saved_with_the_tables_of_today():
    """A reworded caption is seen here, long before nbval executes the notebook."""
    shown, stale = 0, []
    for path in sorted(course.NOTEBOOKS.rglob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            found = re.fullmatch(r'sweeps\.(table|short)\("(\w+)"\)', cell.source)
            if found:
                shown += 1
                saved, table = cell.outputs[0].data, getattr(sweeps, found[1])(found[2])
                if (saved["text/plain"], saved["text/html"]) != (repr(table), table._repr_html_()):
                    stale.append(path.stem)
    assert shown >= 8 and not stale, f"make notebooks N=... executes them anew: {stale}"


def run(rate, seed, value, validation=None):
    validation = value if validation is None else validation
    figures = value, validation, 0.1, 1.0, 1.0
    return results.SweepRun("arm", rate, seed, 60, *figures, "2026-01-01T00:00:00")


def made(scores, seeds=5):
    """A sweep of one arm, with {rate: accuracy} for every seed."""
    runs = [run(rate, seed, value) for rate, value in scores.items() for seed in range(seeds)]
    arms, machine = (results.Arm("arm", {}, 1.0),), {"device": "cpu", "name": "x", "torch": "0"}
    rest = 10, machine, "made", {}, "Mind this.", runs
    return results.Sweep("99_made", "?", Recipe("vit"), arms, *rest)


INSIDE = {0.5: 0.6, 1.0: 0.8, 2.0: 0.7}


def test_a_best_rate_at_the_edge_or_of_few_seeds_is_not_shown():
    inside, edge = made(INSIDE), made({0.5: 0.6, 1.0: 0.7, 2.0: 0.8})
    assert inside.finished("arm") and inside.best("arm") == 1.0 and not edge.finished("arm")
    assert results.shown(inside)["table"]["rows"][0]["accuracy"] == "80.0% ± 0.0"
    with pytest.raises(ValueError, match="not finished: arm lack 5 seeds .*make sweeps N=99"):
        results.shown(edge)
    with pytest.raises(ValueError, match="not finished"):
        results.shown(made(INSIDE, seeds=2))
    with pytest.raises(KeyError, match="99_made"):
        sweeps.table("99_made")
    inside.runs.append(run(2.0, 9, 1.0, validation=0.7))  # chosen by validation, not by the test
    assert inside.best("arm") == 1.0


def test_what_is_shown_follows_from_the_runs_that_are_kept():
    shown = json.loads(sweeps.KEPT.read_text(encoding="utf8"))
    runs = {name: results.shown(results.read(name)) for name in KEPT}
    assert shown == runs, "stale: python -m tools.course.kept_plans sweeps"


def test_a_sweep_is_kept_and_read_again_and_what_is_none_is_refused(tmp_path):
    sweep = made(INSIDE)
    with pytest.raises(FileNotFoundError, match="No sweep '98_none' is kept: there are none"):
        results.read("98_none", tmp_path)
    text = write(sweep, tmp_path).read_text(encoding="utf8")
    assert results.names(tmp_path) == ["99_made"] and results.read("99_made", tmp_path) == sweep
    assert text.count("\n") < 100 and json.loads(text)["runs"][0]["accuracy"] == 0.6
    for broken, message in (
        (text[:-9], "malformed"),
        ("{}", "must hold arms, base"),
        (text.replace('"version": 1', '"version": 2'), "version 2; this code reads version 1"),
    ):
        with pytest.raises(ValueError, match=message):
            results.Sweep.from_json(broken)
    with pytest.raises(ValueError, match="has no arm 'other': it has arm"):
        sweep.arm("other")

"""What a lesson shows of a kept sweep follows from its runs, and a sweep is shown when finished.

The expected values are computed from the JSON text, with pandas and SciPy.
"""

import json
import re

import nbformat
import numpy as np
import pandas as pd
import pytest
import scipy.stats

from benchmarks.sweeps import results
from benchmarks.sweeps.stages import write
from helpers import sweeps
from helpers.recipe import Recipe
from tools import course

KEPT = results.names()


def raw(name):
    """(the JSON values, the runs as a data frame)"""
    values = json.loads((results.FOLDER / f"{name}.json").read_text(encoding="utf8"))
    return values, pd.DataFrame(values["runs"])


def arms_of(name):
    """{arm: its runs with its own number of steps, as a data frame}"""
    values, runs = raw(name)
    found = {}
    for arm in values["arms"]:
        steps = arm["fields"].get("steps", values["base"]["steps"])
        found[arm["name"]] = runs[(runs.arm == arm["name"]) & (runs.steps == steps)]
    return values, found


def best_of(runs):
    """The rate with the highest mean validation accuracy among those with five seeds or more."""
    by_rate = runs.groupby("learning_rate").validation.agg(["mean", "count"])
    return by_rate[by_rate["count"] >= 5]["mean"].idxmax()


@pytest.mark.parametrize("name", KEPT)
def test_every_best_learning_rate_is_inside_its_grid_and_has_five_seeds(name):
    for arm, runs in arms_of(name)[1].items():
        best = best_of(runs)
        around = runs[runs.learning_rate.isin([best / 2, best, best * 2])]
        counts = around.groupby("learning_rate").seed.nunique()
        assert len(counts) == 3 and counts.min() >= 5, (arm, counts)
        first = runs[runs.seed < 2].groupby("learning_rate").validation.mean()
        assert min(first.index) < first.idxmax() < max(first.index), (arm, first)


@pytest.mark.parametrize("name", KEPT)
def test_no_run_is_kept_twice_and_each_is_whole(name):
    values, runs = raw(name)
    assert not runs.duplicated(["arm", "learning_rate", "seed", "steps"]).any()
    assert runs.accuracy.between(0, 1).all() and runs.validation.between(0, 1).all()
    assert (runs.seconds > 0).all() and runs.date.str.match(r"\d{4}-\d\d-\d\dT").all()
    assert values["environment"]["torch"] and values["command"].endswith(name[:2])
    # Accuracies are counts of right answers among the examples that the sweep names.
    for column, examples in (("accuracy", values["base"]["test_size"]), ("validation", None)):
        right = runs[column] * (examples or values["validation"])
        assert np.allclose(right, right.round())


@pytest.mark.parametrize("name", KEPT)
def test_the_table_is_what_the_runs_give(name):
    values, arms = arms_of(name)
    test = {
        arm: runs[runs.learning_rate == best_of(runs)].set_index("seed").accuracy.sort_index()
        for arm, runs in arms.items()
    }
    against = {arm["name"]: arm["against"] for arm in values["arms"]}
    frame = sweeps.table(name).frame.set_index("arm")
    for number, (arm, runs) in enumerate(arms.items()):
        row, scores = frame.loc[arm], 100 * test[arm]
        assert row["accuracy"] == f"{scores.mean():.1f}% ± {scores.std(ddof=1):.1f}"
        assert float(row["best learning rate"]) == pytest.approx(best_of(runs), rel=0.05)
        assert int(row["seeds"]) == len(scores) >= 5
        if number:
            pairs = (scores - 100 * test[against[arm] or next(iter(arms))]).dropna()
            half = scipy.stats.t.ppf(0.975, len(pairs) - 1) * scipy.stats.sem(pairs)
            low, high = pairs.mean() - half, pairs.mean() + half
            shown = [
                float(text) for text in row["difference"].replace(",", "")[:-1].split(" [")[:1]
            ]
            shown += [float(text) for text in row["difference"].split("[")[1][:-1].split(", ")]
            assert shown == pytest.approx([pairs.mean(), low, high], abs=0.051)
            short = sweeps.short(name).frame.set_index("trained").loc[arm]["difference"]
            assert short.startswith(f"{shown[0]:+.1f}, ")
            assert ("not sure" in short) == (low <= 0 <= high)
    for label, accuracy in values["references"].items():
        assert frame.loc[label]["accuracy"] == f"{accuracy:.1%}"


@pytest.mark.parametrize("name", KEPT)
def test_twice_the_steps_is_the_same_arm_rate_and_seeds(name):
    values, arms = arms_of(name)
    _, everything = raw(name)
    sweep = results.read(name)
    for arm, runs in arms.items():
        steps = 2 * sweep.steps(arm)
        longer = everything[(everything.arm == arm) & (everything.steps == steps)]
        gain = sweep.gain_of_twice_the_steps(arm)
        if gain is None:
            assert len(longer) < 2
            continue
        once = runs[runs.learning_rate == best_of(runs)].set_index("seed").accuracy
        twice = longer[longer.learning_rate == best_of(runs)].set_index("seed").accuracy
        assert gain.mean == pytest.approx((twice - once).dropna().mean())


@pytest.mark.parametrize("name", KEPT)
def test_the_caption_and_the_picture_say_what_they_show(name):
    values, runs = raw(name)
    caption = sweeps.table(name).caption
    date = runs.date.iloc[-1][:10]
    for part in (
        values["base"]["model"],
        "CPU",
        values["environment"]["torch"],
        date,
        values["note"],
    ):
        assert part in caption
    figure = sweeps.figure(name)
    axis = figure.axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == list(arms_of(name)[1])
    data, metadata = figure._repr_mimebundle_()
    assert data["image/png"][:4] == b"\x89PNG" and metadata["image/png"]["alt"] == figure.alt
    assert all(arm in figure.alt for arm in arms_of(name)[1])


def test_notebooks_were_saved_with_the_tables_of_today():
    """A reworded caption is seen here, long before nbval executes the notebook."""
    shown, stale = set(), []
    for path in sorted(course.NOTEBOOKS.rglob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            found = re.fullmatch(r'sweeps\.(table|short)\("(\w+)"\)', cell.source)
            if found:
                shown.add((found[1], found[2]))
                saved, table = cell.outputs[0].data, getattr(sweeps, found[1])(found[2])
                if (saved["text/plain"], saved["text/html"]) != (repr(table), table._repr_html_()):
                    stale.append(path.stem)
    both = {
        (how, n) for how in ("table", "short") for n in ("03_freezing", "07_lora", "10_batches")
    }
    assert both | {("table", "01_pretrained"), ("table", "21_qlora")} <= shown
    assert not stale, f"make notebooks N=... executes them anew: {stale}"


def made(scores, start=1.0, seeds=5):
    """A sweep of one arm, with {rate: accuracy} for every seed."""
    arm = results.Arm("arm", {}, start)
    runs = [
        results.SweepRun("arm", rate, seed, 60, value, value, 0.1, 1.0, 1.0, "2026-01-01T00:00:00")
        for rate, value in scores.items()
        for seed in range(seeds)
    ]
    machine = {"device": "cpu", "name": "x", "torch": "0"}
    return results.Sweep(
        "99_made", "?", Recipe("vit"), (arm,), 10, machine, "made", {}, "Mind this.", runs
    )


def test_a_best_rate_at_the_edge_is_not_shown():
    inside = made({0.5: 0.6, 1.0: 0.8, 2.0: 0.7})
    assert inside.finished("arm") and inside.best("arm") == 1.0
    edge = made({0.5: 0.6, 1.0: 0.7, 2.0: 0.8})
    assert not edge.finished("arm")
    with pytest.raises(ValueError, match="not finished: arm lack 5 seeds .*make sweeps N=99"):
        results.shown(edge)
    with pytest.raises(ValueError, match="not finished"):
        results.shown(made({0.5: 0.6, 1.0: 0.8, 2.0: 0.7}, seeds=2))
    assert results.shown(inside)["table"]["rows"][0]["accuracy"] == "80.0% ± 0.0"
    for show in (sweeps.table, sweeps.short, sweeps.figure):
        with pytest.raises(KeyError, match="99_made"):
            show("99_made")


def test_what_is_shown_follows_from_the_runs_that_are_kept():
    kept = json.loads(sweeps.KEPT.read_text(encoding="utf8"))
    runs = {name: results.shown(results.read(name)) for name in KEPT}
    assert kept == runs, "stale: python -m tools.course.kept_plans sweeps"


def test_the_rate_is_chosen_by_validation_and_not_by_test_examples():
    sweep = made({0.5: 0.6, 1.0: 0.8, 2.0: 0.7})
    better_test = results.SweepRun(
        "arm", 2.0, 9, 60, 1.0, 0.7, 0.1, 1.0, 1.0, "2026-01-01T00:00:00"
    )
    sweep.runs.append(better_test)
    assert sweep.best("arm") == 1.0


def test_a_sweep_is_kept_and_read_again(tmp_path):
    sweep = made({0.5: 0.6, 1.0: 0.8, 2.0: 0.7})
    path = write(sweep, tmp_path)
    assert results.names(tmp_path) == ["99_made"] and results.read("99_made", tmp_path) == sweep
    text = path.read_text(encoding="utf8")
    assert text.count("\n") < 100 and json.loads(text)["runs"][0]["accuracy"] == 0.6


def test_what_is_no_sweep_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="No sweep '98_none' is kept: there are none"):
        results.read("98_none", tmp_path)
    text = write(made({1.0: 0.5}), tmp_path).read_text(encoding="utf8")
    for broken, message in (
        (text[:-9], "malformed"),
        ("{}", "must hold arms, base"),
        (text.replace('"version": 1', '"version": 2'), "version 2; this code reads version 1"),
    ):
        with pytest.raises(ValueError, match=message):
            results.Sweep.from_json(broken)
    with pytest.raises(ValueError, match="has no arm 'other': it has arm"):
        made({1.0: 0.5}).arm("other")

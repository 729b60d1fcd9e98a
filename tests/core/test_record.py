"""A record is whole or refused; a table says what it shows."""

from dataclasses import replace as with_

import pytest
import torch

from benchmarks import markdown
from helpers import plots, profile, record, tables
from helpers.plan import OutOfMemory, plan
from helpers.recipe import Recipe, replace
from helpers.record import Run
from tests.small import a_run
from tight_fit.units import size

RECIPE = Recipe(model="vit", steps=6, batch_size=8, train_size=24)
CUT = replace(RECIPE, accumulation=4)


@pytest.fixture(scope="module")
def before():
    return record.run(RECIPE, "99_test/before", device="cpu")


@pytest.fixture
def after(before):
    return with_(before, name="99_test/after", recipe=CUT)


def test_a_run_knows_all_about_itself(before):
    assert len(before.losses) == len(before.seconds) == len(before.rows) == 6
    assert before.plan["peak"] == before.memory["tracked"] == before.peak and before.miss == 0
    assert before.memory["allocated"] is None and 0 <= before.accuracy <= 1
    assert before.environment["torch"] and before.environment["device"] == "cpu"
    assert before.train_rows == 24 and before.test_rows == 500


def test_a_measurement_that_does_not_fit_says_what_would(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(record.measure, "measure", full)
    with pytest.raises(OutOfMemory, match="Out of memory, although the plan needs only"):
        record.run(RECIPE, device="cpu")


def test_the_drivers_version_is_read_from_its_own_words(tmp_path):
    old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024"
    new = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"
    file = tmp_path / "version"
    assert profile.driver_version(file) is None
    for text, version in {old: "535.183.01", new: "580.159.04", "no driver": None}.items():
        file.write_text(f"{text}\nGCC version: gcc 12.2.0")
        assert profile.driver_version(file) == version


def test_the_newest_record_of_each_label_is_read(before, after, tmp_path):
    assert record.read("99_test", tmp_path) == {}
    old = with_(before, date="2020-01-01T00:00:00+00:00")
    for name, run in {"before.a": old, "before.b": before, "after.a": after}.items():
        (tmp_path / f"99_test.{name}.json").write_text(run.to_json())
    assert record.read("99_test", tmp_path) == {"after": after, "before": before}


def test_named_runs_are_written_when_asked(before, tmp_path, monkeypatch):
    monkeypatch.setenv(record.RUNS, str(tmp_path))
    run = record.run(RECIPE, "99_test/again", device="cpu")
    (path,) = tmp_path.iterdir()
    assert path.name == "99_test.again.json" and Run.from_json(path.read_text()) == run
    assert run.losses == before.losses
    with pytest.raises(ValueError, match="no name"):
        record.write(with_(run, name="../escape"), tmp_path)


def test_a_comparison_changes_one_field(before, after):
    text = str(tables.before_after(before, after))
    assert "before: accumulation=1" in text and "after: accumulation=4" in text
    assert size(before.peak) in text
    with pytest.raises(ValueError, match="none"):
        tables.before_after(before, before)
    with pytest.raises(ValueError, match="accumulation, seed"):
        tables.before_after(before, with_(after, recipe=replace(after.recipe, seed=9)))
    random = with_(before, recipe=replace(RECIPE, weights="random"))
    assert "(random weights)" in str(tables.runs({"x": random}))
    assert "random" not in str(tables.runs({"x": before}))


def test_figures_stay_closed_and_show_what_they_say(before, after):
    import matplotlib.pyplot as plt

    both = {"before": plan(RECIPE), "after": plan(CUT)}
    figures = [
        plots.timeline(both),
        plots.timeline(both["before"], capacity=2**30),
        plots.categories(both, "T4"),
        plots.losses({"before": before, "after": after}),
        plots.bars({"a": [0.5, 0.7], "b": 0.9}, "accuracy", True),
    ]
    assert plt.get_fignums() == []
    heights = [axis.lines[-1].get_ydata()[0] for axis in figures[0].axes]
    assert heights == pytest.approx([one.peak / 2**20 for one in both.values()])
    table = tables.plans(both)
    assert "<table" in table._repr_html_() and str(table).count("\n") == 2
    assert markdown.of(table).splitlines()[1].count("---") == len(table.frame.columns)


def test_a_record_of_a_gpu_has_planned_seconds_beside_measured_ones():
    run = a_run("00_small/before")
    planned = plan(run.recipe)
    assert record.seconds_on(planned, "Tesla T4") == planned.seconds("T4").total
    assert record.seconds_on(planned, "Another GPU") is None
    bf16 = plan(replace(run.recipe, precision="bf16"))
    assert record.seconds_on(bf16, "Tesla T4") is None
    adapters = {"lora_rank": 2, "lora_targets": "all-linear", "base": "nf4"}
    inside = plan(Recipe("decoder", batch_size=2, **adapters))  # its products are in bf16
    assert record.seconds_on(inside, "Tesla T4") is None
    assert record.seconds_on(inside, "NVIDIA A100-SXM4-40GB") > 0
    timed = with_(run, plan=run.plan | {"seconds": 0.25})
    assert run.planned_seconds is None and Run.from_json(timed.to_json()).planned_seconds == 0.25
    both = tables.runs({"before": run, "after": timed}).frame
    assert list(both["planned step"]) == ["n/a", "250 ms"]
    assert "planned step" not in tables.runs({"before": run}).frame

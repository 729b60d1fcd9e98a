"""The table of before and after: its numbers are the runs', and no empty record is shown."""

import dataclasses

import pytest

from helpers import show
from helpers.recipe import Recipe, replace
from tests.small import a_run

GPU = {"name": "GPU of a test", "device": "cuda"}
BEFORE = Recipe("deberta", profile="mini", steps=4)


def made(recipe=BEFORE, peak=100 * 2**20, seconds=0.1, accuracy=0.8, label="before"):
    run = a_run(f"02_gradient_accumulation/{label}")
    memory = run.memory | {"tracked": peak}
    figures = {"losses": [1.0] * 4, "seconds": [seconds] * 4, "rows": [16] * 4, "test_rows": 50}
    return dataclasses.replace(
        run, recipe=recipe, plan=run.plan | {"peak": peak}, memory=memory, accuracy=accuracy,
        **figures,
    )  # fmt: skip


AFTER = replace(BEFORE, accumulation=4)


def test_the_sentence_and_the_table_are_of_the_runs(monkeypatch):
    monkeypatch.setattr(show, "read", lambda notebook: {})
    after = made(AFTER, peak=60 * 2**20, seconds=0.15, accuracy=0.78, label="after")
    table = show.before_and_after(made(), after)
    assert "40% less memory" in table.caption and "times the time" not in table.caption
    assert "-2.0 points" in table.caption and "50 test examples" in table.caption
    assert list(table.frame["run"]) == ["before: accumulation=1", "after: accumulation=4"]
    assert list(table.frame["memory, measured"]) == ["100.0 MiB", "60.0 MiB"]


def test_only_times_of_a_gpu_are_compared(monkeypatch):
    monkeypatch.setattr(show, "read", lambda notebook: {})
    memory = {"tracked": 1, "at_peak": {}, "allocated": 2**30, "reserved": 2**30, "device": 2**34}
    before, after = (
        dataclasses.replace(made(recipe, seconds=seconds), environment=GPU, memory=memory)
        for recipe, seconds in ((BEFORE, 0.1), (AFTER, 0.15))
    )
    assert "time per step" not in show.before_and_after(made(), made(AFTER)).frame
    table = show.before_and_after(before, after)
    caption = table.caption
    assert list(table.frame["time per step"]) == ["100 ms", "150 ms"]
    assert "On the GPU of a test" in caption and "1.50 times the time per step" in caption


def test_a_record_is_shown_where_there_is_one(monkeypatch):
    recorded = dataclasses.replace(made(), environment=GPU)
    monkeypatch.setattr(show, "read", lambda notebook: {"before": recorded})
    table = show.before_and_after(made(), made(AFTER))
    assert list(table.frame["run"])[2:] == ["recorded on GPU of a test: before"]


def test_two_fields_cannot_be_compared():
    with pytest.raises(ValueError, match="must differ in one field of the recipe.*2: "):
        show.before_and_after(made(), made(replace(AFTER, batch_size=32)))


def test_random_weights_are_named(monkeypatch):
    monkeypatch.setattr(show, "read", lambda notebook: {})
    plain, changed = replace(BEFORE, weights="random"), replace(AFTER, weights="random")
    assert "80.0% (random weights)" in str(show.before_and_after(made(plain), made(changed)))

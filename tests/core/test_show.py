"""The table of before and after: its numbers are the runs', and no empty record is shown."""

from dataclasses import replace as with_

import pytest

from helpers import show
from helpers.recipe import Recipe, replace
from tests.small import a_run

GPU = {"name": "GPU of a test", "device": "cuda"}
BEFORE = Recipe("deberta", profile="mini", steps=4)
AFTER = replace(BEFORE, accumulation=4)


def made(recipe=BEFORE, peak=100 * 2**20, seconds=0.1, accuracy=0.8, **fields):
    run = a_run("02_gradient_accumulation/a")
    fields = {"memory": run.memory | {"tracked": peak}, "plan": run.plan | {"peak": peak}} | fields
    figures = {"losses": [1.0] * 4, "seconds": [seconds] * 4, "rows": [16] * 4, "test_rows": 50}
    return with_(run, recipe=recipe, accuracy=accuracy, **figures, **fields)


@pytest.fixture
def kept(monkeypatch):
    """The records of the lesson: none, until a test adds some."""
    held = {}
    monkeypatch.setattr(show, "read", lambda notebook: held)
    return held


def test_the_sentence_and_the_table_are_of_the_runs(kept):
    table = show.before_and_after(made(), made(AFTER, 60 * 2**20, 0.15, 0.78))
    assert "40% less memory" in table.caption and "times the time" not in table.caption
    assert "-2.0 points" in table.caption and "50 test examples" in table.caption
    assert list(table.frame["run"]) == ["before: accumulation=1", "after: accumulation=4"]
    assert list(table.frame["memory, measured"]) == ["100.0 MiB", "60.0 MiB"]
    assert "time per step" not in table.frame
    plain, changed = (replace(recipe, weights="random") for recipe in (BEFORE, AFTER))
    assert "80.0% (random weights)" in str(show.before_and_after(made(plain), made(changed)))
    kept["before"] = made(environment=GPU)
    table = show.before_and_after(made(), made(AFTER))
    assert list(table.frame["run"])[2:] == ["recorded on GPU of a test: before"]
    with pytest.raises(ValueError, match="must differ in one field of the recipe.*2: "):
        show.before_and_after(made(), made(replace(AFTER, batch_size=32)))


def test_only_times_of_a_gpu_are_compared(kept):
    memory = {"tracked": 1, "at_peak": {}, "allocated": 2**30, "reserved": 2**30, "device": 2**34}
    on_gpu = {"environment": GPU, "memory": memory}
    table = show.before_and_after(made(**on_gpu), made(AFTER, seconds=0.15, **on_gpu))
    assert list(table.frame["time per step"]) == ["100 ms", "150 ms"]
    assert "On the GPU of a test" in table.caption
    assert "1.50 times the time per step" in table.caption

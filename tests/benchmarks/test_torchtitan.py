"""torchtitan's published tables: the kept plans, and what is said of them."""

import pytest

from benchmarks import torchtitan_steps
from benchmarks.peaks import page


def test_every_row_has_a_kept_plan_and_a_source():
    plans = torchtitan_steps.read()
    assert plans.keys() == {torchtitan_steps.key(row) for row in torchtitan_steps.ROWS}
    for row in torchtitan_steps.ROWS:
        assert row.source.startswith("https://") and row.tokens > 0
        assert row.layout.ranks % 8 == 0


def test_the_page_holds_what_is_said_and_the_data_every_row():
    data = (page.PAGE.parent / "data" / "torchtitan.csv").read_text(encoding="utf8")
    assert data == page.files()["torchtitan.csv"], "run `python -m benchmarks.peaks --page`"
    assert len(data.splitlines()) == 1 + len(torchtitan_steps.ROWS)
    assert all(row.source in data for row in torchtitan_steps.ROWS)
    assert torchtitan_steps.section() in page.PAGE.read_text(encoding="utf8")


@pytest.mark.parametrize("kind", torchtitan_steps.KINDS[:2])
def test_rows_that_are_planned_as_measured_are_missed_by_no_more_than_was_aimed_at(kind):
    memory, tokens = (torchtitan_steps.errors(name, kind) for name in ("reserved", "tokens"))
    assert len(memory) >= 2 and len(tokens) >= 2
    assert sum(map(abs, memory)) / len(memory) < 0.10
    assert sum(map(abs, tokens)) / len(tokens) < 0.20


def test_an_error_is_that_of_its_row(monkeypatch):
    row = torchtitan_steps.ROWS[0]
    plans = {torchtitan_steps.key(row): {"reserved": 2 * row.memory, "tokens": row.tokens / 2}}
    monkeypatch.setattr(torchtitan_steps, "ROWS", (row,))
    monkeypatch.setattr(torchtitan_steps, "read", lambda: plans)
    assert torchtitan_steps.errors("reserved") == pytest.approx([1.0])
    assert torchtitan_steps.errors("tokens") == pytest.approx([-0.5])


@pytest.mark.night
@pytest.mark.parametrize("row", torchtitan_steps.ROWS[:2])
def test_the_kept_plans_of_eight_gpus_are_todays(row):
    kept = torchtitan_steps.read()[torchtitan_steps.key(row)]
    assert row.planned() == pytest.approx(kept, rel=1e-3)

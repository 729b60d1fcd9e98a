"""The kept plans: a file for each group, and the command that makes them anew."""

import json

import pytest

from benchmarks import layout_searches, techniques
from helpers import kept_layouts
from helpers.tables import KEPT_TABLES
from tools.course import kept_plans as command

KEPT = json.loads(KEPT_TABLES.read_text(encoding="utf8"))


def test_each_group_has_its_file_and_tables_of_layouts_are_those_of_the_kept_plans():
    assert {path.stem for path in kept_layouts.FILE.parent.iterdir()} == set(command.GROUPS)
    shown = layout_searches.shown()
    assert set(KEPT) == {*shown, "techniques", "rungs", "savings"}
    assert {name: KEPT[name] for name in shown} == shown, "stale: make plans"


@pytest.mark.night  # by day tests/core/test_plan_tables.py plans some of them
def test_kept_tables_of_techniques_are_planned_alike_today():
    assert {name: KEPT[name] for name in ("techniques", "rungs", "savings")} == techniques.shown()

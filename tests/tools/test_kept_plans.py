"""The kept plans: a file for each group, and the command that makes them anew."""

import json

from helpers import kept_layouts
from helpers.tables import KEPT_TABLES
from tools.course import kept_plans as command


def test_each_group_of_plans_has_its_file():
    files = {path.stem for path in kept_layouts.FILE.parent.iterdir()}
    assert files == set(command.GROUPS)


def test_kept_tables_are_those_of_the_kept_plans():
    kept = json.loads(KEPT_TABLES.read_text(encoding="utf8"))
    assert kept == command.all_tables(), "stale: python -m tools.course.kept_plans tables"

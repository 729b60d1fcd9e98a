"""The kept plans: a file for each group, and the command that makes them anew."""

from helpers import kept_layouts
from tools.course import kept_plans as command


def test_each_group_of_plans_has_its_file():
    files = {path.stem for path in kept_layouts.FILE.parent.iterdir()}
    assert files == set(command.GROUPS)

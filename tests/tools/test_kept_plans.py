"""The kept plans: a file for each group, and the command that makes them anew."""

import pytest

from helpers.plan import kept_layouts
from tools.course import kept_plans as command


def test_each_group_of_plans_has_its_file():
    files = {path.stem for path in kept_layouts.FILE.parent.iterdir()}
    assert files == set(command.GROUPS)


def test_the_command_explains_itself_and_refuses_other_groups(capsys):
    for arguments, status in ((["--help"], 0), (["layout"], 2)):
        with pytest.raises(SystemExit) as stopped:
            command.main(arguments)
        assert stopped.value.code == status
    shown = capsys.readouterr()
    assert "plans/" in shown.out and "use layouts, searches" in shown.err

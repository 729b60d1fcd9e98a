"""docs/plan-your-script.md: every command on the page prints what stands below it."""

import re
import shlex
from pathlib import Path

import pytest

from tight_fit.command import script as command

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan-your-script.md"
SHOWN = re.compile(r"```console\n\$ tight-fit script (.*)\n((?:.*\n)*?)```")
CASES = SHOWN.findall(PAGE.read_text(encoding="utf8"))


def test_the_page_shows_commands():
    assert len(CASES) == 2 and "explain" in PAGE.read_text(encoding="utf8")


@pytest.mark.parametrize("typed, shown", CASES, ids=["before", "after"])
def test_commands_print_what_the_page_shows(typed, shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT / "tests" / "script" / "programs")
    status = command.main(shlex.split(typed))
    assert capsys.readouterr().out == shown
    assert status == (command.TOO_LARGE if "NO, it does not fit" in shown else command.FITS)

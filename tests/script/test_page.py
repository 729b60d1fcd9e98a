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


def test_the_page_shows_commands_and_is_short():
    assert len(PAGE.read_text(encoding="utf8").split()) <= 1500
    assert len(CASES) == 2 and "explain" in PAGE.read_text(encoding="utf8")


@pytest.mark.parametrize("typed, shown", CASES, ids=["before", "after"])
def test_commands_print_what_the_page_shows(typed, shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT / "tests" / "script" / "programs")
    typed, _, lines = typed.partition(" | head -")
    status = command.main(shlex.split(typed))
    said = capsys.readouterr().out.splitlines(keepends=True)
    assert "".join(said[: int(lines) if lines else None]) == shown
    assert status == (command.TOO_LARGE if "NO, it does not fit" in shown else command.FITS)

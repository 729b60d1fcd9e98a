"""Pages about programs say what their commands and programs say."""

import re
import shlex

import pytest

from tests.script import run
from tests.small import ROOT
from tight_fit.command import script as command

SHOWN = re.compile(r"```console\n\$ tight-fit script (.*)\n((?:.*\n)*?)```")
CASES = SHOWN.findall((ROOT / "docs" / "plan-your-script.md").read_text(encoding="utf8"))
PART = re.compile(r"```(python|diff)\n(.*?)```|It needs \*\*([\d.]+) GiB\*\*([^\n]*)", re.DOTALL)


@pytest.mark.parametrize("typed, shown", CASES, ids=["before", "after"])
def test_commands_print_what_plan_your_script_shows(typed, shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT / "tests" / "script" / "programs")
    typed, _, lines = typed.partition(" | head -")
    status = command.main(shlex.split(typed))
    said = capsys.readouterr().out.splitlines(keepends=True)
    assert "".join(said[: int(lines) if lines else None]) == shown
    assert status == (command.TOO_LARGE if "NO, it does not fit" in shown else command.FITS)


def states() -> list[tuple[str, str, str]]:
    """(program, GiB that it needs by docs/out-of-memory.md, the rest of that line), after each
    change."""
    text, found, program = (ROOT / "docs" / "out-of-memory.md").read_text(encoding="utf8"), [], ""
    _, _, text = text.partition("## Change the line")
    for kind, block, need, rest in PART.findall(text.partition("## See it happen")[0]):
        if kind == "python":
            program = block
        elif kind == "diff":
            old, new = (
                "".join(re.findall(rf"^{sign}(.*\n)", block, re.M)) for sign in ("-", r"\+")
            )
            old, new = (old, new) if old.startswith((" ", "for")) else (old.rstrip(), new.rstrip())
            assert program.count(old) == 1, f"The page's program has no line such as {old!r}."
            program = program.replace(old, new)
        else:
            found.append((program, need, rest))
    return found


@pytest.mark.parametrize("number", range(7))
def test_each_change_saves_what_out_of_memory_says(number, program):
    text, need, rest = states()[number]
    facts = run(program(text), gpu="RTX 3060")
    assert f"{facts['need'] / 2**30:.2f}" == need
    assert ("more with every step" in rest) == (facts["growth"] is not None)

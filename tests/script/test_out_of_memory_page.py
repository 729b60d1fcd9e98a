"""docs/out-of-memory.md: its program, change by change, needs what the page says."""

import re
from pathlib import Path

import pytest

from tests.script import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "out-of-memory.md"
PART = re.compile(r"```(python|diff)\n(.*?)```|It needs \*\*([\d.]+) GiB\*\*([^\n]*)", re.DOTALL)


def states() -> list[tuple[str, str, str]]:
    """(program, GiB that it needs by the page, the rest of that line), after each change."""
    text, found = PAGE.read_text(encoding="utf8"), []
    _, _, text = text.partition("## Change the line")
    program = ""
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
def test_each_change_saves_what_the_page_says(number, program):
    text, need, rest = states()[number]
    facts = run(program(text), gpu="RTX 3060")
    assert f"{facts['need'] / 2**30:.2f}" == need
    assert ("more with every step" in rest) == (facts["growth"] is not None)

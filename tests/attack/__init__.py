"""Bad inputs and faults by section, and the table of docs/reliability.md that counts them.

A section is one file, `test_<section>.py`. Its docstring begins with one line, "Title: what is
tried.", which is the section's row in the table. A case is one fault, or one place that takes a
value and is tried with all of `wrong.py`; a case that tries nothing bad belongs in another folder.
After adding cases, run `python -m tests.attack`, which counts them and writes the table. Cases are
cheap: functions and `main(arguments)` are called in this process.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"
LONGEST = 600  # characters of a sentence that refuses something


def sections() -> dict[str, tuple[str, str]]:
    """{file name: (title, what is tried)} of every section, by title."""
    found = {}
    for path in HERE.glob("test_*.py"):
        if path.name != "test_table.py":
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf8"))) or ""
            title, colon, tried = said.partition("\n")[0].partition(": ")
            assert colon and tried, f"{path.name} begins with a docstring 'Title: what is tried.'"
            found[path.name] = title, tried.rstrip(".")
    return dict(sorted(found.items(), key=lambda item: item[1]))


class Counts:
    """{file name: cases} of what pytest collects."""

    cases: Counter[str] = Counter()

    def pytest_collection_finish(self, session):
        self.cases = Counter(item.path.name for item in session.items)


def counted() -> Counter[str]:
    """{file name: cases} of all sections, collected anew. RuntimeError where pytest fails."""
    counts, printed = Counts(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        options = ["--collect-only", "-q", "-n0", "-p", "no:cacheprovider", str(HERE)]
        if pytest.main(options, plugins=[counts]):
            raise RuntimeError(printed.getvalue())
    return counts.cases


def table(cases: Counter[str]) -> str:
    """The rows of all sections in Markdown, with their sum."""
    rows = ["| section | cases | what is tried |", "| --- | --- | --- |"]
    rows += [
        f"| {title} | {cases[file]} | {tried} |" for file, (title, tried) in sections().items()
    ]
    return "\n".join([*rows, f"| **all** | **{sum(cases[file] for file in sections())}** | |"])


def one_sentence(text: str, *parts: str) -> str:
    """Assert that `text` refuses something in one line, and that it says each of `parts`.

    A line that names the command before it ("python -m tight_fit: error: ...") is fine, and so
    is the usage that argparse prints above it. Returns the line.
    """
    assert "Traceback" not in text, text
    lines = [line for line in text.strip().splitlines() if line.strip()]
    usage = next((i for i, line in enumerate(lines) if not line.startswith(("usage:", " "))), 0)
    said = lines[usage:]
    assert len(said) == 1, f"{len(said)} lines instead of one sentence:\n{text}"
    assert len(said[0]) <= LONGEST and said[0].rstrip().endswith((".", "?", "!")), said[0]
    missing = [part for part in parts if part not in said[0]]
    assert not missing, f"{said[0]!r} does not say {missing}"
    return said[0]


def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], parts: Sequence[str] | str, call
) -> str:
    """Assert that `call()` raises such an error with one sentence that says each of `parts`."""
    try:
        call()
    except error as raised:
        return one_sentence(str(raised), *([parts] if isinstance(parts, str) else parts))
    case = getattr(call, "__defaults__", None) or ""  # of a loop, as `lambda case=case: ...`
    pytest.fail(f"DID NOT RAISE {error} {case!r:.200}")


def command_refuses(main, arguments: Sequence[str], capsys, *parts: str) -> str:
    """Assert that a command ends with status 2, prints nothing and says one such sentence."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    return one_sentence(re.sub(r" \([^()]* --help shows examples\.\)", "", said.err), *parts)

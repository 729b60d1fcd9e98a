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
from collections.abc import Iterable, Sequence
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


def counted(items: Iterable[pytest.Item]) -> Counter[str]:
    """{file name: cases} of the collected tests that lie in this folder."""
    return Counter(item.path.name for item in items if item.path.parent == HERE)


class Collector:
    """Keeps what pytest collects."""

    items: tuple[pytest.Item, ...] = ()

    def pytest_collection_finish(self, session):
        self.items = tuple(session.items)


def collected() -> Counter[str]:
    """{file name: cases} of all sections, collected anew. RuntimeError where pytest fails."""
    collector, printed = Collector(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", str(HERE)], plugins=[collector]
        )
    if status:
        raise RuntimeError(printed.getvalue())
    return counted(collector.items)


def table(cases: Counter[str]) -> str:
    """The rows of all sections in Markdown, with their sum."""
    rows = ["| section | cases | what is tried |", "| --- | --- | --- |"]
    rows += [f"| {title} | {cases[file]} | {tried} |" for file, (title, tried) in rows_of(cases)]
    return "\n".join([*rows, f"| **all** | **{sum(cases[file] for file in sections())}** | |"])


def rows_of(cases: Counter[str]) -> list[tuple[str, tuple[str, str]]]:
    """The sections that have cases."""
    return [(file, said) for file, said in sections().items() if cases[file]]


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
    with pytest.raises(error) as caught:
        call()
    return one_sentence(str(caught.value), *([parts] if isinstance(parts, str) else parts))


def command_refuses(main, arguments: Sequence[str], capsys, *parts: str) -> str:
    """Assert that a command ends with status 2, prints nothing and says one such sentence."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    return one_sentence(re.sub(r" \([^()]* --help shows examples\.\)", "", said.err), *parts)

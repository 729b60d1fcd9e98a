"""`python -m tests.attack`: count the cases of every section and write docs/reliability.md."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.attack import BLOCK, HERE, PAGE, counted, table


class Collector:
    """Keeps what pytest collects."""

    items: tuple[pytest.Item, ...] = ()

    def pytest_collection_finish(self, session):
        self.items = tuple(session.items)


def main() -> int:
    """Write the table, and return 0, or pytest's exit status where it cannot collect."""
    collector, printed = Collector(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", str(HERE)], plugins=[collector]
        )
    if status:
        print(printed.getvalue())
        return int(status)
    rows = table(counted(collector.items))
    text = PAGE.read_text(encoding="utf8")
    PAGE.write_text(BLOCK.sub(lambda found: f"{found[1]}{rows}\n{found[2]}", text), encoding="utf8")
    print(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

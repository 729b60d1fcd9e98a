"""`python -m tests.attack`: count the cases of every section and write docs/reliability.md."""

from __future__ import annotations

from benchmarks.pages import with_block
from tests.attack import PAGE, collected, table


def main() -> int:
    """Write the table, and return 0, or 1 where pytest cannot collect."""
    try:
        rows = table(collected())
    except RuntimeError as error:
        print(error)
        return 1
    text = PAGE.read_text(encoding="utf8")
    PAGE.write_text(with_block(text, "attack", rows), encoding="utf8")
    print(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

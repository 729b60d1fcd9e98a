"""`python -m tests.attack`: count the cases of every section and write docs/reliability.md."""

from benchmarks.pages import with_block
from tests.attack import PAGE, counted, table

if __name__ == "__main__":
    rows = table(counted())
    text = PAGE.read_text(encoding="utf8")
    PAGE.write_text(with_block(text, "attack", rows), encoding="utf8")
    print(rows)

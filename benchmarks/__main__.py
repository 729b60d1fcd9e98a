"""`python -m benchmarks` (`make bench`): the planner and the training loop beside others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tight_fit.command.wrapper import run

NAME = "python -m benchmarks"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    argparse.ArgumentParser(
        prog=NAME,
        description="The planner's time beside that of a naive plan, and the training loop beside "
        "those of other frameworks. Takes many minutes.",
    ).parse_args(arguments)
    from benchmarks import beside_others  # takes seconds

    beside_others.print_tables()


if __name__ == "__main__":
    raise SystemExit(run(main, NAME))

"""`python -m tools.pretend [NN ...] [--card T4] [--count 1]`: notebooks on pretended GPUs."""

from __future__ import annotations

import argparse
import sys

from tight_fit.command.arguments import whole_number
from tight_fit.command.wrapper import run as run_command
from tools.pretend.cards import CARDS

NAME = "python -m tools.pretend"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a cell failed that is not excused."""
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument(
        "numbers", nargs="*", metavar="NN", help="notebooks; all when none is named"
    )
    parser.add_argument("--card", choices=list(CARDS), default="T4")
    parser.add_argument("--count", type=whole_number(1, 8), default=1, help="GPUs (1)")
    parser.add_argument("--lessons", action="store_true", help="without the labs")
    asked = parser.parse_args(arguments)
    from tools.course.notebooks import chosen  # takes seconds
    from tools.pretend.rehearse import rehearse

    found = []
    for path in chosen(asked.numbers, labs=not asked.lessons):
        found.append(rehearse(path, asked.card, asked.count))
        for number, error in found[-1].failed.items():
            print(f"    code cell {number}: {error}", flush=True)
    print(
        f"{asked.count} x {asked.card}: {sum(one.ran for one in found)} of "
        f"{sum(one.cells for one in found)} cells ran to their end, "
        f"{sum(len(one.excused) for one in found)} are excused, "
        f"{sum(len(one.failed) for one in found)} failed."
    )
    return int(any(one.failed for one in found))


if __name__ == "__main__":
    sys.exit(run_command(main, NAME))

"""`python -m tools.pretend [NN ...] [--card T4] [--count 1]`: rehearse notebooks on pretended GPUs.

What it finds is kept in docs/rehearsal.json, and docs/rehearsal.md is made from it.
"""

from __future__ import annotations

import argparse
import sys

from helpers.commands.arguments import whole_number
from helpers.commands.wrapper import run as run_command

NAME = "python -m tools.pretend"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a cell failed that is not excused."""
    parser = argparse.ArgumentParser(prog=NAME, description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "numbers", nargs="*", metavar="NN", help="notebooks; all when none is named"
    )
    parser.add_argument("--card", choices=("T4", "A100"), default="T4")
    parser.add_argument("--count", type=whole_number(1, 8), default=1, help="GPUs (1)")
    parser.add_argument("--lessons", action="store_true", help="without the labs")
    parser.add_argument("--page", action="store_true", help="only write docs/rehearsal.md anew")
    asked = parser.parse_args(arguments)
    from tools.course.execute import chosen  # takes seconds
    from tools.pretend import page, rehearse

    wrong = 0
    for path in () if asked.page else chosen(asked.numbers, labs=not asked.lessons):
        result = rehearse.rehearse(path, asked.card, asked.count)
        for number, error in result.failed.items():
            print(f"    code cell {number}: {error}", flush=True)
        wrong += bool(result.failed)
        rehearse.keep(result)
        page.write()
    page.write()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(run_command(main, NAME))

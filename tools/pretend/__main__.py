"""`python -m tools.pretend [NN ...] [--card T4] [--count 1]`: rehearse notebooks on pretended GPUs.

With `--record MINUTES` it is `make record` that is rehearsed, with so many minutes for a call.

What it finds is kept in docs/rehearsal.json, and docs/rehearsal.md is made from it.
"""

from __future__ import annotations

import argparse
import sys

from tight_fit.command.arguments import whole_number
from tight_fit.command.wrapper import run as run_command
from tools.pretend.cards import CARDS

NAME = "python -m tools.pretend"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a cell failed that is not excused."""
    parser = argparse.ArgumentParser(prog=NAME, description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "numbers", nargs="*", metavar="NN", help="notebooks; all when none is named"
    )
    parser.add_argument("--card", choices=list(CARDS), default="T4")
    parser.add_argument("--count", type=whole_number(1, 8), default=1, help="GPUs (1)")
    parser.add_argument("--lessons", action="store_true", help="without the labs")
    parser.add_argument("--record", type=whole_number(2, 600), metavar="MINUTES")
    parser.add_argument("--page", action="store_true", help="only write docs/rehearsal.md anew")
    asked = parser.parse_args(arguments)
    from tools.course.notebooks import chosen  # takes seconds
    from tools.pretend import kept, page, rehearse
    from tools.pretend.record import rehearse_record

    wrong = 0
    if asked.record:
        session = rehearse_record(asked.card, asked.count, asked.record)
        kept.keep(session)
        page.write()
        return int(bool(session.failed) or session.left)
    for path in () if asked.page else chosen(asked.numbers, labs=not asked.lessons):
        result = rehearse.rehearse(path, asked.card, asked.count)
        for number, error in result.failed.items():
            print(f"    code cell {number}: {error}", flush=True)
        wrong += bool(result.failed)
        kept.keep(result)
        page.write()
    page.write()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(run_command(main, NAME))

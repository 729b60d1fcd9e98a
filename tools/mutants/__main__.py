"""`python -m tools.mutants`: run the mutants that have no result yet, then write the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tight_fit.command.arguments import OneLineParser
from tight_fit.command.wrapper import run as run_command
from tools.mutants import table
from tools.mutants.run import again, tidy, verify, work
from tools.mutants.sample import ROOT


def share_out(work_on: Callable[[tuple[int, int]], None], jobs: int) -> None:
    """Run a function in some processes, each with its share."""
    workers = []
    for share in range(jobs):
        if not (worker := os.fork()):
            work_on((share, jobs))
            os._exit(0)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)


def main(arguments: list[str] | None = None) -> None:
    """Run both tiers, one after the other, each shared by some processes."""
    parser = OneLineParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "mutants", help="where reached-*.jsonl lie"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the mutants")
    parser.add_argument("--tiers", type=int, nargs="*", default=[1, 2], choices=[1, 2])
    parser.add_argument("--most", type=float, default=300.0, help="seconds of tests per mutant")
    parser.add_argument(
        "--again",
        metavar="DATE",
        help="first give what was killed before this day to its killers once more (minutes)",
    )
    asked = parser.parse_args(arguments)
    folder, jobs = asked.folder.resolve(), asked.jobs or 1
    tidy(table.RESULTS, asked.again or "")
    if asked.again:
        share_out(partial(again, table.RESULTS, folder, asked.again), jobs)
    for tier in asked.tiers:
        share_out(partial(work, table.RESULTS, folder, tier, most=asked.most), jobs)
    for test in sorted(verify(table.RESULTS, folder)):
        print(f"{test} failed without a mutant as well: what it killed runs again next time.")
    print(table.write())


if __name__ == "__main__":
    raise SystemExit(run_command(main, "python -m tools.mutants"))

"""`python -m benchmarks.sweeps 03 07` (`make sweeps N="03 07"`): run sweeps, or go on with them.

Every run is kept at once in results/sweeps/, so that a killed sweep goes on where it stopped.
Without numbers, all sweeps are run one after another, on the CPU with one thread.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from benchmarks.sweeps.plans import SWEEPS
from benchmarks.sweeps.results import keep, shown
from benchmarks.sweeps.stages import go_on, opened
from helpers.tables import Table
from tight_fit.command.wrapper import run


def main(arguments: list[str] | None = None) -> int:
    """Run the sweeps that are named, and print their tables. Returns 2 for an unknown number."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweeps", description=__doc__)
    parser.add_argument("numbers", nargs="*", help=f"of {', '.join(SWEEPS)}")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes, between runs")
    options = parser.parse_args(arguments)
    matching = {part: [n for n in SWEEPS if n.startswith(part)] for part in options.numbers}
    chosen = [name for names in matching.values() for name in names] or list(SWEEPS)
    unknown = [part for part, names in matching.items() if not names]
    if unknown:
        print(
            f"There is no sweep {', '.join(unknown)}: choose of {', '.join(SWEEPS)}.",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)  # with one thread sums are added in the same order on every machine
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for twice in (False, True):  # a sweep can be shown before it is run with twice the steps
        for plan in (SWEEPS[name] for name in chosen):
            sweep = opened(plan, f"python -m benchmarks.sweeps {plan.name[:2]}")
            if not go_on(sweep, plan.seeds, twice and plan.twice, end):
                print(f"{plan.name} is not finished: the same command goes on with it.")
                return 0
            print(Table(**shown(sweep)["table"]), flush=True)
            keep()
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m benchmarks.sweeps"))

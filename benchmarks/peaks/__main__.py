"""`python -m benchmarks.peaks [NAME ...]`: plan published steps, keep the results, write the page.

Names are parts of the names of points, "Qwen" or "torchtitan"; without any all of them are planned.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import torchtitan_steps
from benchmarks.peaks import page, points, qwen_plans
from tight_fit.command.wrapper import run


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, keep, and write docs/accuracy.md."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peaks",
        description="Plan steps whose memory others measured, keep the results and write "
        "docs/accuracy.md. All of them take half an hour.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of the names of points")
    parser.add_argument("--page", action="store_true", help="plan nothing, only write the page")
    asked = parser.parse_args(arguments)

    def wanted(step: str) -> bool:
        return not asked.page and (not asked.names or any(name in step for name in asked.names))

    points.make(point for point in points.POINTS if wanted(point.name))
    for name, source in (("Qwen", qwen_plans), ("torchtitan", torchtitan_steps)):
        if wanted(name):
            source.make()
    page.write()


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m benchmarks.peaks"))

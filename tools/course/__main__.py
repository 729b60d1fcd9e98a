"""`python -m tools.course COMMAND`, as the Makefile calls it.

run [NN ...]                 execute what changed, write pages and runs to build/, print the tables
save [NN ...]                execute and save in place, cleaned, as committed
record [NN ...] [--dry-run] [--out DIR]    full models on a GPU, runs kept in results/
clean [NN ...]               clean without executing
tables [NN ...]              print the tables of the last run
grade FILE ... [--csv FILE]  run students' copies of notebooks, print which exercises are right
soak [NN ...] [--only KIND]  run notebooks in random order, offline, interrupted, with a GPU that
                             has no kernels
badges [--check]             the repository's address into notebooks and README
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from tools.course import badges, build, clean, grade, record, stress, tables
from tools.course.execute import Failed, chosen


def parser() -> argparse.ArgumentParser:
    """The command line of all commands."""
    whole = argparse.ArgumentParser(
        prog="python -m tools.course",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    commands = whole.add_subparsers(dest="command", required=True)
    for name in ("run", "save", "record", "clean", "tables", "soak"):
        command = commands.add_parser(name)
        command.add_argument(
            "numbers", nargs="*", metavar="NN", help="notebooks, as 02; all when none is named"
        )
        if name == "record":
            command.add_argument(
                "--dry-run", action="store_true", help="small models, any device, nothing is kept"
            )
            command.add_argument("--out", type=Path, help="another folder than results/")
        if name == "soak":
            command.add_argument("--rounds", type=int, default=3, help="of random order (3)")
            command.add_argument(
                "--seed", type=int, default=0, help="of the order and the interrupts (0)"
            )
            command.add_argument("--only", choices=stress.KINDS, help="one kind instead of all")
            command.add_argument(
                "--cells", type=int, help="only the first so many code cells: a quick look"
            )
    grading = commands.add_parser("grade")
    grading.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="students' notebooks, anywhere"
    )
    grading.add_argument("--csv", type=Path, help="also write the table there")
    commands.add_parser("badges").add_argument(
        "--check", action="store_true", help="change nothing, fail where stale"
    )
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 after an error, 130 after an interrupt."""
    asked = parser().parse_args(arguments)
    typed = "python -m tools.course " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    try:
        if asked.command == "badges":
            return badges.command(asked.check)
        if asked.command == "grade":
            grade.command(asked.files, asked.csv)
            return 0
        paths = chosen(asked.numbers)
        if asked.command == "soak":
            return stress.soak(paths, asked.rounds, asked.seed, asked.only, asked.cells)
        if asked.command == "run":
            build.run(paths, typed)
        elif asked.command == "save":
            build.save(paths, typed)
        elif asked.command == "record":
            record.record(paths, asked.dry_run, asked.out, typed)
        elif asked.command == "clean":
            for path in paths:
                clean.rewrite(path)
        else:
            tables.show(paths)
    except (Failed, ValueError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted: what was unfinished is not kept.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

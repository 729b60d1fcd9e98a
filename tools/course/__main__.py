"""`python -m tools.course COMMAND`, as the Makefile calls it.

run [NN ...]                 execute what changed, write pages and runs to build/, print the tables
save [NN ...]                execute and save in place, cleaned, as committed
record [NN ...] [--minutes M] [--out DIR] [--dry-run]
                             full models on a GPU, runs kept in results/; without numbers the
                             measured steps of every technique come first
keep DIR                     check what `record --out DIR` wrote, and copy it to results/
clean [NN ...]               clean without executing
tables [NN ...]              print the tables of the last run
grade FILE ... [--csv FILE]  run students' copies of notebooks, print which exercises are right;
                             exit status 1 where one could not be graded whole
assign NN ... --out DIR      lessons as assignments for nbgrader, with answers and checks apart
soak [NN ...] [--only KIND]  run notebooks offline, and with a GPU that has no kernels
badges [--check]             the repository's address into notebooks and README
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from tight_fit.command.arguments import OneLineParser, new_file, new_folder, whole_number
from tight_fit.command.wrapper import run as run_command
from tight_fit.command.wrapper import sentence

NAME = "python -m tools.course"
KINDS = ("offline", "no-kernels")  # of tools.course.stress, a test compares


def parser() -> argparse.ArgumentParser:
    """The command line of all commands."""
    whole = OneLineParser(
        prog=NAME, formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__
    )
    commands = whole.add_subparsers(dest="command", required=True)
    made = {name: commands.add_parser(name) for name in ("run", "save", "record", "clean", "soak")}
    for command in (*made.values(), commands.add_parser("tables")):
        command.add_argument(
            "numbers", nargs="*", metavar="NN", help="notebooks, as 02; all when none is named"
        )
    add = made["record"].add_argument
    add("--dry-run", action="store_true", help="small models, any device, nothing is kept")
    add("--out", type=new_folder, help="another folder than results/")
    left = "after which the rest is left for the next call (no limit)"
    add("--minutes", type=whole_number(1, 10_000), help=left)
    made["soak"].add_argument("--only", choices=KINDS, help="one kind instead of both")
    add = commands.add_parser("grade").add_argument
    notebooks = "students' notebooks, or folders of them"
    add("files", nargs="+", type=Path, metavar="FILE", help=notebooks)
    add("--csv", type=new_file, help="also write the grades there, row by row")
    counts = "what counts in every notebook (those of the lesson, or of its lab)"
    add("--exercises", nargs="+", metavar="NN.k", default=[], help=counts)
    ended = "that a notebook may take before it is ended (900)"
    add("--seconds", type=whole_number(1, 86_400), default=900, help=ended)
    memory = "that all processes of a notebook may take together (8)"
    add("--memory", type=whole_number(1, 4096), default=8, metavar="GIB", help=memory)
    add = commands.add_parser("assign").add_argument
    add("numbers", nargs="+", metavar="NN", help="lessons, as 02, or names of labs")
    add("--out", type=new_folder, required=True, help="the assignment's folder in source/")
    commands.add_parser("keep").add_argument("folder", type=Path, metavar="DIR")
    commands.add_parser("badges").add_argument(
        "--check", action="store_true", help="change nothing, fail where stale"
    )
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 after an error, 130 after an interrupt."""
    asked = parser().parse_args(arguments)
    if asked.command == "grade" and not __debug__:
        print(
            "Exercises are checked by assert statements: run Python without -O, and unset "
            "PYTHONOPTIMIZE.",
            file=sys.stderr,
        )
        return 1
    typed = f"{NAME} {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    from tools.course.notebooks import Failed

    try:
        return _run(asked, typed)
    except (Failed, ValueError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"\n{sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted: what was unfinished is not kept.", file=sys.stderr)
        return 130


def _run(asked: argparse.Namespace, typed: str) -> int:
    if asked.command in ("record", "keep"):
        return _record(asked, typed)
    if asked.command == "assign":
        from tools.course import assignment
        from tools.course.notebooks import chosen

        written = assignment.write(chosen(asked.numbers), asked.out)
        print("Written:\n" + "\n".join(f"    {path}" for path in written))
        return 0
    from tools.course import badges, build, clean, grade, sandbox, stress, tables  # take seconds
    from tools.course.notebooks import chosen

    if asked.command == "badges":
        return badges.command(asked.check)
    if asked.command == "grade":
        limits = sandbox.Limits(seconds=asked.seconds, memory=asked.memory * 2**30)
        return grade.command(asked.files, asked.csv, limits, asked.exercises)
    paths = chosen(asked.numbers, labs=asked.command in ("save", "soak", "clean"))
    if asked.command == "soak":
        return stress.soak(paths, asked.only)
    if asked.command == "run":
        build.run(paths, typed)
    elif asked.command == "save":
        build.save(paths, typed)
    elif asked.command == "clean":
        for path in paths:
            clean.rewrite(path)
    else:
        tables.show(paths)
    return 0


def _record(asked: argparse.Namespace, typed: str) -> int:
    """`record` and `keep`, which import no Jupyter: steps are measured without it."""
    from tools.course import record, session
    from tools.course.notebooks import chosen

    if asked.command == "keep":
        names = session.keep(asked.folder)
        print("Copied to results/:\n" + "\n".join(f"    {name}" for name in names))
        return 0
    if asked.minutes and (asked.numbers or asked.dry_run):
        raise ValueError(
            "--minutes divides a recording of all notebooks over calls: leave it out where some "
            "are named, and with --dry-run."
        )
    paths = chosen(asked.numbers)
    if asked.dry_run or asked.numbers:
        record.record(paths, asked.dry_run, asked.out, typed)
        return 0
    return session.session(paths, asked.minutes, asked.out, typed)


if __name__ == "__main__":
    sys.exit(run_command(main, NAME))

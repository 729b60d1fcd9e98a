"""The command `tight-fit script`: plan a training program, unchanged, on a GPU that is not here.

    tight-fit script train.py --gpu T4 -- --batch_size 16

Exit status: 0 it fits, 1 it does not, 2 it cannot be planned (one sentence says why), 3 the program
itself failed (its own lines are shown).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tight_fit.command.arguments import OneLineParser, whole_number
from tight_fit.command.wrapper import sentence
from tight_fit.gpus import GPU, find
from tight_fit.script.clock import say
from tight_fit.script.given import SECONDS, check, importing

NAME = "tight-fit script"
FITS, TOO_LARGE, REFUSED, FAILED = 0, 1, 2, 3
EXAMPLES = """\
examples:
  tight-fit script train.py --gpu T4
  tight-fit script train.py --gpu "RTX 3060" -- --batch_size 16 --epochs 3
  tight-fit script run_glue.py --gpu 8GB -- --model_name_or_path roberta-base --output_dir out
"""
LAUNCHERS = ("accelerate", "deepspeed", "python", "python3", "torchrun")


def parser(prog: str = NAME) -> argparse.ArgumentParser:
    """The options of the command; what stands after `--` is the program's."""
    options = OneLineParser(
        prog=prog,
        description="Plan the memory and the time of a training program, unchanged: run it on "
        "tensors without values until its memory has settled, and say whether a GPU holds it, "
        "which lines made the largest tensors, and which changes would make it fit. Needs no "
        "GPU, reads no weights, saves nothing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("script", help="the program, a .py file")
    add("--gpu", "--card", required=True, help="the GPU by name, or its size, such as 8GB")
    add(
        "--ranks",
        metavar="N",
        type=whole_number(1, 1024),
        help="plan a program for torchrun, as rank 0 of N (or as RANK of WORLD_SIZE, where set)",
    )
    add("--quick", action="store_true", help="only whether it fits, not what would")
    add("--json", action="store_true", help="print one JSON object")
    add("--output", action="store_true", help="show what the program itself prints")
    add("--progress", action="store_true", help="say each second what runs, as on a terminal")
    add("--trust", action="store_true", help="run it where nothing keeps its writing apart, too")
    add(
        "--seconds",
        metavar="N",
        type=whole_number(1, 86400),
        default=SECONDS,
        help=f"of CPU time that one run of the program may take ({SECONDS})",
    )
    return options


def main(arguments: Sequence[str] | None = None, prog: str = NAME) -> int:
    """Run the command and return the exit status; argparse itself exits with 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = parser(prog)
    first = next((word for word in given if word != "--"), "")
    if first in LAUNCHERS and not Path(first).exists():
        options.error(
            f"{first} launches a program: name the program itself, and how many processes train "
            f"it, as in {prog} train.py --gpu T4 --ranks 2 -- --its_own_options."
        )
    asked = options.parse_args(given[:cut])
    try:
        gpu = find(asked.gpu)
        check(asked.script)
    except (ValueError, OSError) as error:
        options.error(sentence(error))
    return plan(asked, gpu, tuple(given[cut + 1 :]), prog)


def plan(asked: argparse.Namespace, gpu: GPU, arguments: tuple[str, ...], prog: str) -> int:
    """Plan a program that can be read, print the answer, and return the exit status."""
    told = (asked.progress or sys.stderr.isatty()) and not asked.json and not asked.output
    terminal = os.dup(sys.stderr.fileno()) if told else None  # the program's own is elsewhere
    say(terminal, f"planning: importing what {Path(asked.script).name} uses")
    with importing():
        from tight_fit.script.plan import plan_program
        from tight_fit.script.program import ProgramFailed, Refused
    options = {name: getattr(asked, name) for name in ("ranks", "quick", "seconds", "trust")}
    try:
        planned = plan_program(
            asked.script, gpu, arguments, **options, output=asked.output, terminal=terminal
        )
    except Refused as error:
        say(terminal, "")
        print(f"{prog}: error: {sentence(error)}", file=sys.stderr)
        return REFUSED
    except ProgramFailed as error:
        say(terminal, "")
        print(f"{prog}: error: {sentence(error)}", file=sys.stderr)
        for line in error.lines:
            print(f"  {line}", file=sys.stderr)
        return FAILED
    say(terminal, "")
    if asked.json:
        tried = [vars(remedy) for remedy in planned.remedies or ()]
        print(json.dumps({**planned.facts, "remedies": tried}, indent=1))
    else:
        print(planned)
    return FITS if planned else TOO_LARGE

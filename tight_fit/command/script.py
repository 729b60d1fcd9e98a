"""The command `tight-fit script`: plan a training program, unchanged, on a GPU that is not here.

    tight-fit script train.py --gpu T4 -- --batch_size 16

Exit status: 0 it fits, 1 it does not, 2 it cannot be planned (one sentence says why), 3 the program
itself failed (its own lines are shown).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tight_fit.command.arguments import OneLineParser, whole_number
from tight_fit.command.wrapper import run, sentence
from tight_fit.gpus import GPU, VISIBLE, find
from tight_fit.packages import missing
from tight_fit.script.clock import say

NAME = "tight-fit script"
FITS, TOO_LARGE, REFUSED, FAILED = 0, 1, 2, 3
SECONDS = 600  # for one run of the program
HEAVY = ("accelerate", "bitsandbytes", "datasets", "lightning_fabric", "peft")  # to import
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
        allow_abbrev=False,
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


def check(script: str) -> None:
    """Raises FileNotFoundError or ValueError for what is no Python program, in one sentence."""
    if not script.strip():
        raise ValueError("the name of the program is empty: name a .py file.")
    path = Path(script)
    if path.is_dir():
        raise ValueError(f"{script} is a folder: name the program, a .py file.")
    if not path.is_file():
        raise FileNotFoundError(f"{script} is not there: name the program, a .py file.")
    if path.suffix == ".ipynb":
        raise ValueError(
            f"{script} is a notebook: write %load_ext tight_fit and %%plan above its training "
            "cell, or make a program of it with jupyter nbconvert --to script."
        )
    try:
        compile(path.read_bytes(), script, "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        at = f"{path.name}:{line}" if line else path.name
        raise ValueError(f"{at} is not Python: {getattr(error, 'msg', error)}.") from None


def plan(asked: argparse.Namespace, gpu: GPU, arguments: tuple[str, ...], prog: str) -> int:
    """Plan a program that can be read, print the answer, and return the exit status."""
    told = (asked.progress or sys.stderr.isatty()) and not asked.json and not asked.output
    terminal = os.dup(sys.stderr.fileno()) if told else None  # the program's own is elsewhere
    say(terminal, f"planning: importing what {Path(asked.script).name} uses")
    with patch.dict(os.environ, {VISIBLE: ""}):  # or CUDA would start here, and work in no copy
        gc.disable()  # nothing that is imported is garbage, and looking for it takes time
        try:
            from tight_fit.script import process, remedies, report
            from tight_fit.script.program import ProgramFailed, Refused, ToPlan, script_of
        finally:
            gc.enable()
        _load_what_is_mentioned(asked.script, arguments)
    work = script_of(asked.script, arguments)
    rank = _rank(asked.ranks)

    def planned(change: dict[str, Any]) -> dict[str, Any]:
        wanted = ToPlan(asked.script, arguments, gpu, change=change, rank=rank)
        shown = asked.output and not change
        return process.plan(wanted, work, asked.seconds, shown, asked.trust, terminal)

    try:
        facts = planned({})
        found = None
        if not facts["fits"] and not asked.quick:
            found = remedies.find(facts, gpu, planned)
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
        tried = [vars(remedy) for remedy in found or ()]
        print(json.dumps({**facts, "remedies": tried}, indent=1))
    else:
        print("\n".join(report.lines(facts, found)))
    return FITS if facts["fits"] else TOO_LARGE


def _rank(ranks: int | None) -> Any:
    """The rank that is asked for, by the option or by torchrun's environment; None for none."""
    from tight_fit.script.ranks import ProgramRank

    told = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if all(number.isdecimal() for number in told):
        number, there = map(int, told)
        if ranks is None and number < there:
            return ProgramRank(number, there)
        if ranks is not None and number < ranks:
            return ProgramRank(number, ranks)
    return None if ranks is None else ProgramRank(0, ranks)


def _load_what_is_mentioned(script: str, arguments: tuple[str, ...]) -> None:
    """Import what the program imports and takes long, once for all of its runs.

    bitsandbytes as well where an argument names it: its layers must be known beforehand.
    """
    text = Path(script).read_text(encoding="utf8", errors="replace")
    wanted = {name for name in HEAVY if re.search(rf"^\s*(from|import)\s+{name}\b", text, re.M)}
    if re.search(r"bitsandbytes|load_in_[48]bit|8bit|bnb", text + " ".join(arguments)):
        wanted.add("bitsandbytes")
    for name in sorted(wanted):
        if not missing(name):
            import_module(name)


def entry(prog: str = NAME, arguments: Sequence[str] | None = None) -> int:
    """What `tight-fit script` runs, with everything that may end it told in one line."""
    given = sys.argv[2:] if arguments is None else arguments
    return run(lambda: main(given, prog), prog)

"""How long the command takes: `python -m benchmarks`.

Each question is asked of the command in a process of its own, imports and start of Python included,
in wall and in CPU seconds. A busy machine stretches the first and leaves the second nearly alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from benchmarks.pages import records
from tight_fit.command.wrapper import run

FEW = 4  # seconds
# Configurations of no known model: {its name here: (a known model, what is different)}.
UNKNOWN: dict[str, tuple[str, dict[str, int]]] = {
    "base.json": ("FacebookAI/roberta-base", {"vocab_size": 50000}),
    "8b.json": ("meta-llama/Llama-3.1-8B", {"vocab_size": 128000}),
}


def commands(
    beside: Path | None = None, few: bool = False, words: Sequence[str] = ()
) -> pd.DataFrame:
    """CPU seconds of the command, each line a process of its own and a cache that begins empty.

    beside  the folder of another version, which answers each question in turn with this one
    few     leave out the questions that take longer than a few seconds
    words   only the questions whose names hold one of these; all where there are none
    """
    rows = []
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as other:
        unknown = _write_unknown(Path(own))
        for label, typed, goal in records("commands.csv").itertuples(index=False):
            if (few and goal > FEW) or (words and not any(word in label for word in words)):
                continue
            typed = " ".join(unknown.get(word, word) for word in typed.split())
            wall, cpu, status = _asked(typed, Path(__file__).parents[1], own)
            row = {
                "question": label,
                "wall, s": f"{wall:.2f}",
                "CPU, s": f"{cpu:.2f}",
                "goal, s": str(goal),
                "exit status": str(status),
            }
            if beside is not None:
                before = _asked(typed, beside, other)[1]
                row |= {"CPU of the other, s": f"{before:.2f}", "ratio": f"{before / cpu:.2f}"}
            rows.append(row)
            # What is known when a long run is stopped; the table is printed at its end.
            print("; ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)
    return pd.DataFrame(rows)


def _write_unknown(folder: Path) -> dict[str, str]:
    """{name in a question: path} of the configurations of `UNKNOWN`, which are written there."""
    from tight_fit.models.names import known  # imports libraries for seconds

    for file, (name, different) in UNKNOWN.items():
        (folder / file).write_text(json.dumps(known()[name] | different), encoding="utf8")
    return {file: str(folder / file) for file in UNKNOWN}


def _asked(typed: str, folder: Path, cache: str) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds, exit status) of a command of the version in a folder."""
    places = {"XDG_CACHE_HOME": cache, "LOCALAPPDATA": cache, "PYTHONPATH": str(folder)}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tight_fit", *typed.split()],
        cwd=folder,
        env=os.environ | places,
        capture_output=True,
        text=True,
    )
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, done.returncode


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="How long the command takes. Takes many minutes; --few, one or two.",
    )
    parser.add_argument(
        "--beside", metavar="FOLDER", type=Path, help="another version, asked the same in turn"
    )
    parser.add_argument("--few", action="store_true", help="only what takes a few seconds")
    parser.add_argument(
        "--only", metavar="WORD", nargs="+", default=(), help="commands whose names hold a word"
    )
    asked = parser.parse_args(arguments)
    print(commands(asked.beside, asked.few, asked.only).to_string(index=False))


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m benchmarks"))

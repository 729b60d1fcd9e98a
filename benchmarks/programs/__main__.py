"""`python -m benchmarks.programs FOLDER`: other people's programs, planned and run for real.

FOLDER holds clones by the name of the repository, such as FOLDER/trl and FOLDER/accelerate. Each
program of benchmarks/data/programs.json that is there runs unchanged: planned without a GPU, and
for real on this CPU. A program that is not there is left out with a sentence.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.programs import table
from tight_fit.command.wrapper import run as run_command

NAME = "python -m benchmarks.programs"
STEPS = 3  # of which the last two are compared: the first one makes the optimizer's states
SECONDS = 300.0  # for one plan
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is there and print a line each; 1 where bytes differ from those that were kept."""
    options = argparse.ArgumentParser(prog=NAME, description=__doc__)
    options.add_argument("folder", help="where the clones are")
    options.add_argument("--only", metavar="WORD", default="", help="programs whose name has it")
    options.add_argument("--gpu", metavar="NAME", help="plan for this GPU instead, and run nothing")
    options.add_argument("--new", action="store_true", help="only those without kept bytes")
    options.add_argument("--keep", action="store_true", help="write the bytes to programs.json")
    asked = options.parse_args(arguments)
    folder = Path(asked.folder).resolve()
    if not folder.is_dir():
        options.error(f"{asked.folder} is no folder: name the one that holds the clones.")
    facts = table.read()
    chosen = [entry for entry in facts["programs"] if asked.only in table.command(entry)]
    with tempfile.TemporaryDirectory() as work:
        _prepare(Path(work))
        changed = False
        for entry in chosen:
            if asked.new and "real" in entry:
                continue
            changed |= _tried(folder, entry, asked.gpu, asked.keep)
            if asked.keep:
                facts["versions"] = {name: version(name) for name in PACKAGES}
                table.write(facts)
    return int(changed)


def _prepare(work: Path) -> None:
    """Make `work` the current folder, with everything that programs read."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / ".hub")}
    os.environ["HF_MODULES_CACHE"] = str(work / ".modules")
    from benchmarks.programs import inputs  # reads these variables when it is imported

    inputs.write(work)
    os.chdir(work)


def _tried(folder: Path, entry: dict[str, Any], gpu: str | None, keep: bool) -> bool:
    """Plan and run a program, print what came out, and say whether it differs from what is kept."""
    script = folder / entry["repository"].split("/")[1] / entry["path"]
    if not script.is_file():
        print(f"{table.command(entry)}: left out, {script} is not there.")
        return False
    if table.digest(script) != entry["sha256"]:
        print(f"{table.command(entry)}: left out, it is not the version {entry['version']}.")
        return False
    if gpu is not None:
        needed = _planned(script, entry["arguments"], gpu)["need"]
        print(f"{table.command(entry)}: needs {needed:,} bytes on a {gpu}.", flush=True)
        return False
    on_cpu = f"{entry['arguments']} {entry['on_cpu']}"
    found = {"planned": _steps(_planned(script, on_cpu, None)["steps"])}
    from benchmarks.programs.real import steps_of

    found["real"] = steps_of(script, tuple(on_cpu.split()), STEPS, Path.cwd())[1:]
    print(f"{table.command(entry)}: planned {found['planned']}, real {found['real']}.", flush=True)
    differs = any(entry.get(name) != value for name, value in found.items())
    if keep:
        entry.update(found)
    return differs and not keep


def _planned(script: Path, arguments: str, gpu: str | None) -> dict[str, Any]:
    from tight_fit.gpus import find
    from tight_fit.script import process
    from tight_fit.script.program import ToPlan, script_of

    given = tuple(arguments.split())
    wanted = ToPlan(str(script), given, gpu and find(gpu), steps=None if gpu else STEPS)
    return process.plan(wanted, script_of(str(script), given), SECONDS)


def _steps(steps: list[dict[str, int]]) -> list[int]:
    return [step["peak"] - step["begin"] for step in steps][1:]


if __name__ == "__main__":
    raise SystemExit(run_command(main, NAME))

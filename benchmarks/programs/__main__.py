"""`python -m benchmarks.programs FOLDER`: other people's programs, planned and run for real.

FOLDER holds clones by the name of the repository, such as FOLDER/trl and FOLDER/accelerate. Each
program of benchmarks/data/programs.json that is there runs unchanged: planned without a GPU, and
for real on this CPU. A program that is not there is left out with a sentence.

With --published FOLDER is tests/calibration of torch-preflight 0.5.0's source package, which holds
the program that measured the peaks it publishes, and these peaks. Each case that needs transformers
alone is planned as `tight-fit script` plans it: two lines import the program, unchanged, and call
its function for one case. Configurations come from the models that the package knows.
"""

from __future__ import annotations

import argparse
import json
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
PROGRAM, PEAKS, GPU = "measure_cuda.py", "measured_peaks.json", "T4"
# It asks PyTorch whether the GPU computes in bf16, which says so of a T4, as it can emulate it.
CALL = """import sys; sys.path.insert(0, {folder!r})
import torch, measure_cuda
measure_cuda.real_model_case({model!r}, {kind!r}, {batch}, {length}, torch.bfloat16)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is there and print a line each; 1 where bytes differ from those that were kept."""
    options = argparse.ArgumentParser(prog=NAME, description=__doc__)
    options.add_argument("folder", help="where the clones are")
    options.add_argument("--only", metavar="WORD", default="", help="programs whose name has it")
    options.add_argument("--gpu", metavar="NAME", help="plan for this GPU instead, and run nothing")
    options.add_argument("--keep", action="store_true", help="write the bytes to programs.json")
    options.add_argument("--published", action="store_true", help=f"{PROGRAM} of torch-preflight")
    asked = options.parse_args(arguments)
    folder = Path(asked.folder).resolve()
    if not folder.is_dir():
        options.error(f"{asked.folder} is no folder: name the one that holds the clones.")
    facts = table.read()
    if asked.published:
        for name in (PROGRAM, PEAKS):
            if not (folder / name).is_file():
                options.error(f"{asked.folder} holds no {name}: name tests/calibration.")
        return _published(folder, facts, asked.keep)
    chosen = [entry for entry in facts["programs"] if asked.only in table.command(entry)]
    with tempfile.TemporaryDirectory() as work:
        _prepare(Path(work))
        changed = False
        for entry in chosen:
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


def _published(folder: Path, facts: dict[str, Any], keep: bool) -> int:
    """Plan each case of the program that measured a T4, and print a line; 1 where bytes differ."""
    runs = json.loads((folder / PEAKS).read_text(encoding="utf8"))["runs"]
    found = [_case(folder, run) for run in runs if "seq_len" in run["config"]]
    for case in found:
        named = f"{case['model']}, {case['batch']} x {case['length']}"
        print(f"{named}: {case['planned']:,} planned, {case['measured']:,} measured", flush=True)
    if keep:
        digest = table.digest(folder / PROGRAM)
        table.write(facts | {"published": {"gpu": GPU, "sha256": digest, "cases": found}})
    return int(facts["published"]["cases"] != found and not keep)


def _case(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """What one published run says, and what is planned of it: allocated bytes."""
    from tight_fit.models import names as model_names

    config = run["config"]
    kind = "causal-lm" if run["model"] == "gpt2" else "encoder"
    case = {"model": run["model"], "batch": config["batch_size"], "length": config["seq_len"]}
    with tempfile.TemporaryDirectory() as place:
        values = model_names.known()[model_names.full_name(run["model"])]
        mirrored = Path(place, "models", run["model"])
        mirrored.mkdir(parents=True)
        (mirrored / "config.json").write_text(json.dumps(values), encoding="utf8")
        os.environ["TIGHT_FIT_MIRROR"] = place
        script = Path(place, "one_case.py")
        script.write_text(CALL.format(folder=str(folder), kind=kind, **case), encoding="utf8")
        planned = _planned(script, "", GPU)["allocated"]
    return case | {"planned": planned, "measured": run["measured_allocated_bytes"]}


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

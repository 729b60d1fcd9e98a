"""`python -m benchmarks.programs.published FOLDER`: a stranger's measuring program, planned.

torch-preflight 0.5.0 comes with the program that measured the peaks it publishes, and with these
peaks (FOLDER is tests/calibration of its source package: measure_cuda.py and measured_peaks.json).
Each case that needs transformers alone is planned as `tight-fit script` plans it: two lines import
the program, unchanged, and call its function for one case. Configurations come from the models
that the package knows. `tests/benchmarks/test_programs.py` holds the table to the kept facts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.programs import table
from tight_fit.command.wrapper import run as run_command

NAME = "python -m benchmarks.programs.published"
PROGRAM, PEAKS, GPU = "measure_cuda.py", "measured_peaks.json", "T4"
# It asks PyTorch whether the GPU computes in bf16, which says so of a T4, as it can emulate it.
CALL = """import sys; sys.path.insert(0, {folder!r})
import torch, measure_cuda
measure_cuda.real_model_case({model!r}, {kind!r}, {batch}, {length}, torch.bfloat16)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan each case and print a line; 1 where bytes differ from those that were kept."""
    options = argparse.ArgumentParser(prog=NAME, description=__doc__)
    options.add_argument("folder", help=f"holds {PROGRAM} and {PEAKS}")
    options.add_argument("--keep", action="store_true", help="write the bytes to programs.json")
    asked = options.parse_args(arguments)
    folder = Path(asked.folder).resolve()
    for name in (PROGRAM, PEAKS):
        if not (folder / name).is_file():
            options.error(f"{asked.folder} holds no {name}: name tests/calibration.")
    measured = json.loads((folder / PEAKS).read_text(encoding="utf8"))["runs"]
    facts = table.read()
    found = [planned(folder, run) for run in measured if "seq_len" in run["config"]]
    for case in found:
        print(f"{case['model']}, {case['batch']} x {case['length']}: {line(case)}", flush=True)
    differs = facts.get("published", {}).get("cases") != found
    if asked.keep:
        digest = table.digest(folder / PROGRAM)
        table.write(facts | {"published": {"gpu": GPU, "sha256": digest, "cases": found}})
    return int(differs and not asked.keep)


def planned(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """What one published run says, and what is planned of it: allocated bytes."""
    from tight_fit import gpus
    from tight_fit.models import names as model_names
    from tight_fit.script import process
    from tight_fit.script.program import ToPlan, script_of

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
        wanted = ToPlan(str(script), (), gpus.find(GPU))
        facts = process.plan(wanted, script_of(str(script), ()), 300.0)
    measured = run["measured_allocated_bytes"]
    return case | {"planned": facts["allocated"], "measured": measured}


def line(case: dict[str, Any]) -> str:
    """Planned and measured bytes, and what the plan misses."""
    return f"{case['planned']:,} planned, {case['measured']:,} measured, {miss(case):+.2%}"


def miss(case: dict[str, Any]) -> float:
    """The relative error of the plan."""
    return case["planned"] / case["measured"] - 1


def markdown() -> str:
    """The table of docs/checked-programs.md."""
    facts = table.read()["published"]
    lines = ["| case | planned | measured | |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {case['model']}, {case['batch']} × {case['length']} tokens | {case['planned']:,} | "
        f"{case['measured']:,} | {miss(case):+.2%} |"
        for case in facts["cases"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(run_command(main, NAME))

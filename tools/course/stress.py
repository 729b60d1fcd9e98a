"""`make soak`: the notebooks under bad conditions, each in a kernel of its own; nothing is saved.

offline     as on Kaggle with nothing attached: without a network, and without the packages that a
            hosted machine may lack, also for child processes (soaked/sitecustomize.py)
no-kernels  with a GPU that cannot run this PyTorch (simulated, also by soaked/sitecustomize.py):
            the first cell must say so in one sentence, and what to do, and must hide the GPU before
            CUDA starts, so that all other cells run on the CPU
"""

from __future__ import annotations

import os
from pathlib import Path

from tools.course.execute import execute, runs
from tools.course.notebooks import Failed

KINDS = ("offline", "no-kernels")
SOAKED = Path(__file__).resolve().parent / "soaked"
ADVICE = "cannot run this PyTorch"  # in the answer of gpus.probe


def soak(paths: list[Path], only: str | None = None) -> int:
    """Run the notebooks under every kind of condition, or `only` one.

    Gives the exit code: 0, or 1 where a notebook failed, after which the others still run.
    """
    failed = []
    for kind in KINDS if only is None else (only,):
        print(f"\n{kind}", flush=True)
        for path in paths:
            try:
                if kind == "no-kernels":
                    advised(path, path.parent)
                else:
                    execute(path, environment(kind))
            except Exception as error:  # whatever it is, the other notebooks have their turn
                print(f"\n{type(error).__name__}: {error}\n", flush=True)
                failed.append(f"{path.stem} ({kind})")
    print(f"\nFailed: {', '.join(failed)}." if failed else "\nNothing failed.", flush=True)
    return int(bool(failed))


def environment(mode: str) -> dict[str, str]:
    """The variables that a kernel gets beside those of this process, for a kind of condition."""
    paths = [str(SOAKED), os.environ.get("PYTHONPATH")]
    given = {"TIGHT_FIT_PROFILE": "mini", "TIGHT_FIT_RUNS": "", "TIGHT_FIT_SOAK": mode}
    given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if mode == "offline":  # the first cell installs what is missing, and pip must find no index
        return given | {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "PIP_NO_INDEX": "1"}
    # As a student meets it: no profile asked for, the GPU in sight.
    return given | {"TIGHT_FIT_PROFILE": "", "CUDA_VISIBLE_DEVICES": "0"}


def advised(path: Path, folder: Path) -> str:
    """The line with which the first cell answers a GPU that cannot run this PyTorch.

    Raises Failed where it is silent, and where this or a later cell fails.
    """
    done, _ = execute(path, environment("no-kernels"), folder)
    first = next(cell for cell in done.cells if runs(cell))
    said = "".join(output.get("text", "") for output in first.outputs)
    line = next((line for line in said.splitlines() if ADVICE in line and line.endswith(".")), None)
    if line is None:
        raise Failed(
            f"{path.name}: its first cell does not say that the GPU cannot be used. It says:\n\n"
            f"{said}"
        )
    return line

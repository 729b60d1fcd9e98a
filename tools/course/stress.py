"""`make soak`: the notebooks under bad conditions, each in a kernel of its own; nothing is saved.

order        in random order, several rounds
offline      as on Kaggle with nothing attached: without a network, and without the packages that a
             hosted machine may lack, also for child processes (soaked/sitecustomize.py)
interrupted  interrupted in its second half, then run whole in the same kernel; no process may be
             left behind
no-kernels   with a GPU that cannot run this PyTorch (simulated, also by soaked/sitecustomize.py):
             the first cell must say so in one sentence, and what to do, and must hide the GPU
             before CUDA starts, so that all other cells run on the CPU
pretended    on a pretended T4 (tools.pretend), where the full models run, narrow; every cell must
             run but those that speak of what a rehearsal lacks
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat

from helpers.tables import Table
from tools.course.execute import execute, runs
from tools.course.interrupt import run_interrupted
from tools.course.notebooks import Failed
from tools.pretend.rehearse import rehearse

KINDS = ("order", "offline", "interrupted", "no-kernels", "pretended")
SOAKED = Path(__file__).resolve().parent / "soaked"
ADVICE = "cannot run this PyTorch"  # in the answer of gpus.probe


def soak(
    paths: list[Path],
    rounds: int = 3,
    seed: int = 0,
    only: str | None = None,
    cells: int | None = None,
) -> int:
    """Run the notebooks under every kind of condition, or `only` one; print a table for each kind.

    Times are in seconds. Gives the exit code: 0, or 1 where a notebook failed, after which the
    others still run.

    rounds  how often "order" runs each notebook; the other kinds run it once
    seed    decides the order, and where notebooks are interrupted
    cells   only the first so many code cells of each notebook, None for all
    Raises ValueError for a number below 1 or an unknown kind.
    """
    if only is not None and only not in KINDS:
        raise ValueError(f"only={only!r} is not known: use {', '.join(KINDS)}.")
    for name, value in (("rounds", rounds), ("cells", cells)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be 1 or more.")
    chance, failed = random.Random(seed), 0
    for kind in KINDS if only is None else (only,):
        turns = [paths]
        if kind == "order":
            turns = [chance.sample(paths, len(paths)) for _ in range(rounds)]
        failed += _kind(kind, turns, chance, cells)
    return 1 if failed else 0


def _kind(kind: str, turns: list[list[Path]], chance: random.Random, cells: int | None) -> int:
    """Runs notebooks in these turns; gives the number of failures. Prints its table in any case."""
    run: Callable[[Path, Path, random.Random], object] = {
        "order": lambda path, folder, _: execute(path, environment(), folder),
        "offline": lambda path, folder, _: execute(path, environment("offline"), folder),
        "interrupted": lambda path, folder, chance: run_interrupted(
            path, environment(), folder, chance
        ),
        "no-kernels": lambda path, folder, _: advised(path, folder),
        "pretended": lambda path, folder, _: pretended(path, folder),
    }[kind]
    seconds: dict[str, list[float]] = {path.stem: [] for path in sorted(turns[0])}
    wrong = dict.fromkeys(seconds, 0)
    try:
        for number, turn in enumerate(turns, 1):
            print(
                f"\n{kind}" + (f", round {number} of {len(turns)}" if len(turns) > 1 else ""),
                flush=True,
            )
            for path in turn:
                begun = time.perf_counter()
                try:
                    with _first(path, cells) as short:
                        run(short, path.parent, chance)
                except Exception as error:  # whatever it is, the other notebooks have their turn
                    kind_of = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
                    print(f"\n{kind_of}{error}\n", flush=True)
                    wrong[path.stem] += 1
                seconds[path.stem].append(time.perf_counter() - begun)
    finally:
        print("\n" + str(_table(kind, seconds, wrong)), flush=True)
    return sum(wrong.values())


def _table(kind: str, seconds: dict[str, list[float]], wrong: dict[str, int]) -> Table:
    rows: list[dict] = [
        {
            "notebook": name,
            "rounds": len(each),
            "least s": f"{min(each):.1f}",
            "most s": f"{max(each):.1f}",
            "failures": wrong[name],
        }
        for name, each in seconds.items()
        if each
    ]
    total = sum(map(len, seconds.values()))
    return Table(rows, f"Soak, {kind}: {sum(wrong.values())} of {total} runs failed")


def environment(mode: str = "") -> dict[str, str]:
    """The variables that a kernel gets beside those of this process.

    mode  "offline" or "no-kernels", as in soaked/sitecustomize.py; "" for neither
    """
    given = {"TIGHT_FIT_PROFILE": "mini", "TIGHT_FIT_RUNS": "", "TIGHT_FIT_SOAK": mode}
    if mode:
        given["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(SOAKED), os.environ.get("PYTHONPATH")])
        )
    if mode == "offline":  # the first cell installs what is missing, and pip must find no index
        given |= {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "PIP_NO_INDEX": "1"}
    if mode == "no-kernels":  # as a student meets it: no profile asked for, the GPU in sight
        given |= {"TIGHT_FIT_PROFILE": "", "CUDA_VISIBLE_DEVICES": "0"}
    return given


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


def pretended(path: Path, folder: Path, card: str = "T4") -> None:
    """Run a notebook on a pretended GPU. Raises Failed, which names the cells that failed."""
    found = rehearse(path, card, 1, folder=folder)
    if found.failed:
        cells = "\n".join(f"    code cell {number}: {why}" for number, why in found.failed.items())
        raise Failed(f"{path.name} failed on a pretended {card}:\n{cells}")


@contextmanager
def _first(path: Path, cells: int | None) -> Iterator[Path]:
    """The notebook, or a copy elsewhere of all up to its `cells`th code cell."""
    if cells is None:
        yield path
        return
    notebook = nbformat.read(path, as_version=4)
    code = [index for index, cell in enumerate(notebook.cells) if runs(cell)]
    notebook.cells = notebook.cells[: code[min(cells, len(code)) - 1] + 1]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        nbformat.write(notebook, Path(folder) / path.name)
        yield Path(folder) / path.name

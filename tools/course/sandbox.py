"""A place where one submission runs: a fresh copy of the project, limits, and an end to everything.

Where the system can isolate a process (`tight_fit.isolation`), the submission also sees no process
but its own, writes into memory that goes with it, reaches no network, and finds the folder of the
other submissions empty. What the teacher's account may read it can read. `separate` says whether
this machine allows it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tight_fit import isolation
from tight_fit.units import GIB
from tools.course import ROOT
from tools.course.leftovers import unfinished

COPIED = (
    *("tight_fit", "helpers", "by_hand", "exercises", "scripts", "benchmarks", "results"),
    *("pyproject.toml", "constraints.txt"),
    *("requirements.txt", "requirements-data.txt", "requirements-dev.txt"),
)
HERE = Path(__file__).parent
PROGRESS = 2**20  # bytes of notes about its cells that are read
# What a submission learns of this process's variables: no token of the teacher's is among them.
PASSED = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("TIGHT_FIT_PROFILE", "TIGHT_FIT_MIRROR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "CUDA_HOME"),
)


@dataclass(frozen=True)
class Limits:
    """What one submission may use.

    seconds    of wall-clock time
    memory     bytes of all its processes together
    processes  that run at the same time
    file       bytes of a file that it writes
    """

    seconds: float = 900.0
    memory: int = 8 * GIB
    processes: int = 200
    file: int = GIB


@dataclass
class Ended:
    """How a submission ended.

    why     "time", "memory", "processes", "disk" or "stopped" where a limit ended it, else None
    status  the exit status; negative for a signal
    cell    the number of the cell that ran at the end, None after the last
    errors  {cell: what it raised}
    """

    why: str | None
    status: int | None
    cell: int | None
    errors: dict[int, str]


@contextmanager
def copy_of_project() -> Iterator[Path]:
    """A fresh copy of what notebooks import, with an empty notebooks/ to run in; then removed."""
    with unfinished(Path(tempfile.gettempdir()), "tight-fit") as folder:
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name)
            else:
                shutil.copy2(ROOT / name, folder / name)
        for name in ("notebooks", "temporary"):
            (folder / name).mkdir()
        yield folder


def separate() -> bool:
    """Whether submissions are isolated here."""
    return isolation.why_not() is None


def run(
    cells: Sequence[tuple[int, str]], folder: Path, limits: Limits, hidden: Sequence[Path] = ()
) -> Ended:
    """Execute cells in the copy of the project `folder`, and end all that they started.

    cells   (number, source) of each code cell
    hidden  folders that the submission should find empty, where that can be had
    """
    listed = folder / "cells.json"
    listed.write_text(json.dumps(cells), encoding="utf8")
    with tempfile.TemporaryFile() as progress:  # which has no name that a submission could take
        ended = _supervised(listed, progress.fileno(), folder, limits, hidden)
        cell, errors = _read(os.pread(progress.fileno(), PROGRESS, 0))
    return Ended(ended["why"], ended["status"], cell, errors)


def _supervised(
    listed: Path, progress: int, folder: Path, limits: Limits, hidden: Sequence[Path]
) -> dict[str, Any]:
    """How the process ended in which the cells ran: {"why": ..., "status": ...}."""
    alone = separate()
    given = {
        "seconds": limits.seconds,
        "memory": limits.memory,
        "processes": limits.processes,
        "file": limits.file,
        "folder": str(folder),
        "progress": progress,
        "alone": alone,
        "hidden": [str(path) for path in _outermost(hidden, folder)],
    }
    command = [sys.executable, str(HERE / "run_cells.py"), str(listed), str(progress)]
    supervisor = subprocess.Popen(
        [sys.executable, str(HERE / "supervise.py"), json.dumps(given), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder / "notebooks",
        env=_environment(folder, alone),
        start_new_session=True,
        pass_fds=[progress],
    )
    assert supervisor.stdin is not None and supervisor.stdout is not None
    try:
        supervisor.wait(limits.seconds + 60)
    finally:
        supervisor.stdin.close()  # where we are interrupted: it ends everything then, and itself
        out = supervisor.stdout.read()
        supervisor.stdout.close()
        supervisor.wait(60)
    try:
        return json.loads(out)
    except ValueError:
        return {"why": "stopped", "status": None}


def _environment(folder: Path, alone: bool) -> dict[str, str]:
    temporary = str(folder / "temporary")
    kept = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {
        **kept,
        **({"HF_HUB_OFFLINE": "1"} if alone else {}),
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "MPLBACKEND": "agg",
        "TMPDIR": temporary,
        "IPYTHONDIR": temporary,
        "MPLCONFIGDIR": temporary,
    }


def _outermost(hidden: Sequence[Path], folder: Path) -> list[Path]:
    """The folders that can be hidden, without those that lie in another of them."""
    can = {Path(os.path.realpath(path)) for path in hidden if "\n" not in str(path)}
    able = sorted(path for path in can if _can_be_hidden(path, folder))
    return [path for path in able if not any(other in path.parents for other in able)]


def _can_be_hidden(hidden: Path, folder: Path) -> bool:
    """Whether nothing lies below that a submission needs: its copy, Python, or the tools."""
    needed = (folder, Path(sys.prefix), Path(sys.base_prefix), HERE, Path("/usr/bin"))
    return hidden.is_dir() and not any(path.is_relative_to(hidden) for path in needed)


def _read(told: bytes) -> tuple[int | None, dict[int, str]]:
    """The cell that began last, and what failed. The submission may have written anything."""
    cell, errors = None, {}
    for line in told.decode("utf8", "replace").splitlines():
        try:
            note = json.loads(line)
            cell = note["cell"]
            if "error" in note:
                errors[int(cell)] = str(note["error"])[:300]
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            continue
    return cell if isinstance(cell, int) else None, errors

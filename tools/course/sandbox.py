"""A place where one submission runs: a fresh copy of the project, limits, and an end to everything.

On Linux, where user namespaces are allowed, the submission also gets namespaces of its own (by
util-linux' `unshare`): it sees no process but its own, may write only into its copy (and into
memory: /dev/shm), and finds the folder of the other submissions empty. The network stays open, as
does what the teacher's account may read. `separate` says whether this machine allows it.
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
from functools import lru_cache
from pathlib import Path

from helpers.units import GIB
from tools.course import ROOT
from tools.course.leftovers import unfinished

COPIED = (
    *(
        "helpers",
        "exercises",
        "scripts",
        "benchmarks",
        "results",
        "pyproject.toml",
        "constraints.txt",
    ),
    *("requirements.txt", "requirements-data.txt", "requirements-dev.txt"),
)
HERE = Path(__file__).parent
# What a submission learns of this process's variables: no token of the teacher's is among them.
PASSED = (
    *("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    *("TIGHT_FIT_PROFILE", "TIGHT_FIT_MIRROR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "CUDA_HOME"),
)
# In namespaces of its own: the copy stays writable, everything else becomes read-only, HIDDEN is
# empty; then every privilege over these namespaces is given up. Mounts that cannot be changed stay.
ENTER = r"""
mount --bind "$COPY" "$COPY" || exit 97
printf "%s" "$HIDDEN" | while IFS= read -r place; do
  mount -t tmpfs -o size=4k,mode=755 tmpfs "$place" || exit 97
done || exit 97
cut -d" " -f5 /proc/self/mountinfo | while IFS= read -r place; do
  case "$place" in "$COPY"|/proc*|/dev|/dev/*) ;; *) mount -o remount,bind,ro "$place" ;; esac
done 2>/dev/null
cd "$COPY/notebooks" || exit 97
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""
UNSHARE = ("unshare", "-U", "-r", "-m", "-p", "-i", "-f", "--mount-proc", "--kill-child")


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


@lru_cache(maxsize=1)
def separate() -> bool:
    """Whether submissions get namespaces of their own here."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return False
    with tempfile.TemporaryDirectory(prefix="tight-fit-") as folder:
        Path(folder, "notebooks").mkdir()
        environment = {**os.environ, "COPY": folder, "HIDDEN": ""}
        try:
            tried = subprocess.run(
                [*UNSHARE, "sh", "-c", ENTER, "sh", "true"],
                env=environment,
                capture_output=True,
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError):
            return False
        return tried.returncode == 0


def run(
    cells: Sequence[tuple[int, str]], folder: Path, limits: Limits, hidden: Sequence[Path] = ()
) -> Ended:
    """Execute cells in the copy of the project `folder`, and end all that they started.

    cells   (number, source) of each code cell
    hidden  folders that the submission should find empty, where that can be had
    """
    listed, progress = folder / "cells.json", folder / "progress"
    listed.write_text(json.dumps(cells), encoding="utf8")
    progress.touch()
    command = [sys.executable, str(HERE / "run_cells.py"), str(listed), str(progress)]
    if separate():
        command = [*UNSHARE, "sh", "-c", ENTER, "sh", *command]
    given = {
        "seconds": limits.seconds,
        "memory": limits.memory,
        "processes": limits.processes,
        "file": limits.file,
        "folder": str(folder),
    }
    supervisor = subprocess.Popen(
        [sys.executable, str(HERE / "supervise.py"), json.dumps(given), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder / "notebooks",
        env=_environment(folder, hidden),
        start_new_session=True,
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
        told = json.loads(out)
    except ValueError:
        told = {"why": "stopped", "status": None}
    cell, errors = _read(progress)
    return Ended(told["why"], told["status"], cell, errors)


def _environment(folder: Path, hidden: Sequence[Path]) -> dict[str, str]:
    temporary = str(folder / "temporary")
    kept = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "MPLBACKEND": "agg",
        "TMPDIR": temporary,
        "IPYTHONDIR": temporary,
        "MPLCONFIGDIR": temporary,
        "COPY": str(folder),
        "HIDDEN": "".join(f"{path}\n" for path in _outermost(hidden, folder)),
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


def _read(progress: Path) -> tuple[int | None, dict[int, str]]:
    """The cell that began last, and what failed. The submission may have written anything."""
    cell, errors = None, {}
    try:
        with progress.open(encoding="utf8", errors="replace") as file:
            lines = file.read(2**20).splitlines()
    except OSError:
        return None, {}
    for line in lines:
        try:
            note = json.loads(line)
            cell = note["cell"]
            if "error" in note:
                errors[int(cell)] = str(note["error"])[:300]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return cell if isinstance(cell, int) else None, errors

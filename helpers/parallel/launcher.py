"""Ranks from a notebook: a script run by torchrun in a process of its own, its output shown rank by rank.

A function defined in a notebook cannot be sent to other processes, and a process that has used its GPU cannot be forked.
A script written by a cell (`%%writefile`) and started afresh has neither trouble, in JupyterLab, Colab and Kaggle alike.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from helpers import gpus

ROOT = Path(__file__).resolve().parent.parent.parent
LOOK = 0.05  # seconds between looks at the ranks' output
GRACE = 10.0  # seconds that ranks are given to end when told to


class RankFailed(RuntimeError):
    """A rank ended with an error.

    rank       the first rank that failed, None where torchrun itself did
    exitcode   its exit code; negative: the signal that killed it
    traceback  what it wrote to its error output
    """

    def __init__(self, rank: int | None, ranks: int, exitcode: int | None, traceback: str):
        self.rank, self.exitcode, self.traceback = rank, exitcode, traceback
        who = "torchrun" if rank is None else f"rank {rank} of {ranks}"
        how = (
            f"was killed by signal {-exitcode} ({_signal(-exitcode)})"
            if exitcode is not None and exitcode < 0
            else f"failed with exit code {exitcode}"
        )
        if exitcode == -signal.SIGABRT and traceback.startswith(
            "Traceback"
        ):  # gloo's threads may abort a process at its end
            how = "failed"
        said = traceback.strip() or "It wrote no error."
        super().__init__(
            f"{who[0].upper()}{who[1:]} {how}; the others were stopped. What it wrote:\n\n{said}"
        )


def launch(
    script: str | Path,
    *arguments: object,
    ranks: int = 2,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    show: bool = True,
) -> list[str]:
    """Run a Python script as `ranks` processes with torchrun, show what they print, and return it, one text a rank.

    torchrun tells each process who it is by environment variables: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, a free port. The ranks see every GPU, `helpers` can be imported, and each uses one CPU thread.

    arguments  the script's own
    timeout    seconds after which all is stopped
    env        more environment variables
    show       print each line as it comes, after "[rank] "
    Raises RankFailed with the first failing rank's traceback, TimeoutError, FileNotFoundError (no such script),
    ValueError (no ranks). However it ends, also by an interrupt, no process is left behind.
    """
    script = Path(script).resolve()
    if not script.is_file():
        raise FileNotFoundError(
            f"There is no script {script.name} here: run the cell that writes it first."
        )
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r} must be a whole number from 1 on.")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--redirects=3",
            f"--log-dir={folder}",
            str(script),
            *map(str, arguments),
        ]
        errors = Path(folder) / "torchrun.txt"
        with errors.open("w") as file:
            process = subprocess.Popen(
                command,
                env=_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_die_with_parent if _LINUX else None,
            )
        output = _Output(Path(folder), ranks, show)
        try:
            _wait(process, output, timeout)
        finally:
            _stop(process)
            output.read()
        if process.returncode:
            rank, exitcode = _first_failure(errors.read_text(errors="replace"))
            raise RankFailed(
                rank,
                ranks,
                process.returncode if exitcode is None else exitcode,
                output.errors(rank) if rank is not None else errors.read_text(errors="replace"),
            )
        return output.texts


def _wait(process: subprocess.Popen, output: _Output, timeout: float) -> None:
    end = time.monotonic() + timeout
    while process.poll() is None:
        output.read()
        if time.monotonic() > end:
            last = "; ".join(
                f"rank {rank}: {text.strip().splitlines()[-1] if text.strip() else 'nothing'}"
                for rank, text in enumerate(output.texts)
            )
            raise TimeoutError(
                f"The ranks were not done after {timeout:g} seconds and were stopped. Last printed: {last}."
            )
        time.sleep(LOOK)


class _Output:
    """What the ranks print, read from the files that torchrun redirects it to."""

    def __init__(self, folder: Path, ranks: int, show: bool):
        self.folder, self.show = folder, show
        self.texts, self.shown = [""] * ranks, [0] * ranks

    def _file(self, rank: int, name: str) -> Path | None:
        return next(self.folder.glob(f"*/attempt_0/{rank}/{name}.log"), None)

    def read(self) -> None:
        for rank in range(len(self.texts)):
            file = self._file(rank, "stdout")
            self.texts[rank] = file.read_text(errors="replace") if file else ""
            whole = self.texts[rank].rfind("\n") + 1
            if self.show and whole > self.shown[rank]:
                for line in self.texts[rank][self.shown[rank] : whole].splitlines():
                    print(f"[{rank}] {line}", flush=True)
            self.shown[rank] = max(whole, self.shown[rank])

    def errors(self, rank: int) -> str:
        """The rank's error output from its last traceback on."""
        file = self._file(rank, "stderr")
        text = file.read_text(errors="replace") if file else ""
        text = re.sub(
            rf"^\[rank{rank}\]:? ?", "", text, flags=re.MULTILINE
        )  # which torch puts before each line
        begin = text.rfind("Traceback (most recent call last)")
        return text[max(begin, 0) :]


def _first_failure(report: str) -> tuple[int | None, int | None]:
    """(rank, exit code) of the first failure in torchrun's own report, (None, None) where it has none."""
    root = report[max(report.rfind("Root Cause"), 0) :]
    found = re.search(r"rank\s*:\s*(\d+)\s.*?exitcode\s*:\s*(-?\d+)", root, re.DOTALL)
    return (int(found[1]), int(found[2])) if found else (None, None)


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    here["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    )
    gpus.show_all(here)  # a notebook for one GPU hid the others from itself
    return here | dict(more or {})


def _stop(process: subprocess.Popen) -> None:
    """End torchrun and every process that it started; told to first, then by force."""
    try:
        family = [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            pass
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


_LINUX = sys.platform == "linux"


def _die_with_parent() -> None:
    """In the child before it starts: let the kernel of Linux send it SIGTERM if the notebook's process dies."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

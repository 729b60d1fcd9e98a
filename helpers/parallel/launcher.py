"""Ranks started from a notebook: a script run by torchrun, its output shown rank by rank.

A function defined in a notebook cannot be sent to other processes, and a process that has used its
GPU cannot be forked. A script that a cell writes (`%%writefile`), started in new processes, has
neither problem, in JupyterLab, Colab and Kaggle alike.
"""

from __future__ import annotations

import ctypes
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
from helpers.values import whole

ROOT = Path(__file__).resolve().parent.parent.parent
POLL = 0.05  # seconds between two looks at the ranks' output
GRACE = 10.0  # seconds that torchrun has to end after SIGTERM, before it is killed
PR_SET_PDEATHSIG = 1  # an option of Linux's prctl(2)


class RankFailed(RuntimeError):
    """A rank ended with an error.

    rank       the first rank that failed; None where torchrun itself did
    exitcode   its exit code; a negative one is the signal that killed it; None where it is unknown
    traceback  what the rank wrote to its error output, from the last traceback on
    """

    def __init__(self, rank: int | None, ranks: int, exitcode: int | None, traceback: str):
        self.rank, self.exitcode, self.traceback = rank, exitcode, traceback
        who = "torchrun" if rank is None else f"rank {rank} of {ranks}"
        if exitcode == -signal.SIGABRT and traceback.startswith("Traceback"):
            how = "failed"  # by the error of the traceback; gloo's threads may abort afterwards
        elif exitcode is not None and exitcode < 0:
            how = f"was killed by signal {-exitcode} ({_signal_name(-exitcode)})"
        else:
            how = f"failed with exit code {exitcode}"
        written = traceback.strip() or "It wrote no error."
        super().__init__(
            f"{who[0].upper()}{who[1:]} {how}; the others were stopped. What it wrote:\n\n{written}"
        )


def launch(
    script: str | Path,
    *arguments: object,
    ranks: int = 2,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    show: bool = True,
) -> list[str]:
    """Run a Python script as `ranks` processes with torchrun; returns what each rank printed.

    torchrun tells each process who it is by environment variables: RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, a free port. The ranks see every GPU, also those that the notebook
    hid from itself; `helpers` can be imported; each rank uses one CPU thread.

    arguments  those of the script
    timeout    seconds after which all ranks are stopped
    env        more environment variables
    show       print each line as it comes, after "[rank] "
    Raises RankFailed with the traceback of the first rank that failed, TimeoutError after
    `timeout`, FileNotFoundError where there is no such script, TypeError or ValueError for a number
    of ranks that is no int or below 1. However it ends, also by an interrupt, no process is left
    behind.
    """
    script = Path(script).resolve()
    if not script.is_file():
        raise FileNotFoundError(
            f"There is no script {script.name} here: run the cell that writes it first."
        )
    whole("ranks", ranks, 1)
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
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        output = _Output(Path(folder), ranks, show)
        try:
            _wait(process, output, timeout)
        finally:
            _stop(process)
            output.read()
        if process.returncode:
            rank, exitcode = first_failure(errors.read_text(errors="replace"))
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
            lines = [text.strip().splitlines() or ["nothing"] for text in output.texts]
            last = "; ".join(f"rank {rank}: {printed[-1]}" for rank, printed in enumerate(lines))
            raise TimeoutError(
                f"The ranks were not done after {timeout:g} seconds and were stopped: pass a "
                f"longer timeout, or find what they wait for. Last printed: {last}."
            )
        time.sleep(POLL)


class _Output:
    """What the ranks print, read from the files that torchrun redirects it to.

    `texts` is what each rank has printed so far, `shown` how many of its characters were shown.
    """

    def __init__(self, folder: Path, ranks: int, show: bool):
        self.folder, self.show = folder, show
        self.texts, self.shown = [""] * ranks, [0] * ranks

    def _file(self, rank: int, name: str) -> Path | None:
        return next(self.folder.glob(f"*/attempt_0/{rank}/{name}.log"), None)

    def read(self) -> None:
        """Read all that has been printed by now, and show the lines that are complete."""
        for rank in range(len(self.texts)):
            file = self._file(rank, "stdout")
            self.texts[rank] = file.read_text(errors="replace") if file else ""
            complete = self.texts[rank].rfind("\n") + 1
            if self.show and complete > self.shown[rank]:
                for line in self.texts[rank][self.shown[rank] : complete].splitlines():
                    print(f"[{rank}] {line}", flush=True)
            self.shown[rank] = max(complete, self.shown[rank])

    def errors(self, rank: int) -> str:
        """The rank's error output from its last traceback on."""
        file = self._file(rank, "stderr")
        text = file.read_text(errors="replace") if file else ""
        # torch puts the rank before each line.
        text = re.sub(rf"^\[rank{rank}\]:? ?", "", text, flags=re.MULTILINE)
        begin = text.rfind("Traceback (most recent call last)")
        return text[max(begin, 0) :]


def first_failure(report: str) -> tuple[int | None, int | None]:
    """(rank, exit code) of the first failure in torchrun's report, or (None, None)."""
    cause = report[max(report.rfind("Root Cause"), 0) :]
    match = re.search(r"rank\s*:\s*(\d+)\s.*?exitcode\s*:\s*(-?\d+)", cause, re.DOTALL)
    return (int(match[1]), int(match[2])) if match else (None, None)


def environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """The ranks' environment variables: this process's, what `launch` promises, and `more`."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    gpus.show_all(variables)  # a notebook for one GPU hid the others from itself
    return variables | dict(more or {})


def _stop(process: subprocess.Popen) -> None:
    """End torchrun and every process that it started: by SIGTERM, and after `GRACE` by force."""
    try:
        torchrun = psutil.Process(process.pid)
        family = [torchrun, *torchrun.children(recursive=True)]
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _die_with_parent() -> None:
    """Called in the child before torchrun starts, on Linux only.

    It makes the kernel send torchrun SIGTERM when the notebook's process dies.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

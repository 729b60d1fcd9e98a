"""Ranks started from a notebook: a script run by torchrun, its output shown rank by rank.

A function defined in a notebook cannot be sent to other processes, and a process that has used its
GPU cannot be forked. A script that a cell writes (`%%writefile`), started in new processes, has
neither problem, in JupyterLab, Colab and Kaggle alike.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from helpers import keeper
from tight_fit import gpus
from tight_fit.checks import of_type, real, shown, whole

ROOT = Path(__file__).resolve().parent.parent
POLL = 0.05  # seconds between two looks at the ranks' output
MOST_RANKS = 1024  # on one machine
MOST_MACHINES = 9  # that are only pretended
# Seconds for ranks to be done. One of a lesson needs 6 seconds of a core, of which Python takes a
# quarter to end after the last line is printed: on a machine that others use, minutes.
TIMEOUT = 600.0
GRACE = 10.0  # seconds that torchrun has to end after SIGTERM, before it is killed
REPORT = "torchrun.txt"  # what torchrun itself wrote, in the folder of its ranks
# The errors of ranks whose neighbour is gone, which are consequences.
GONE = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Timed out", re.IGNORECASE
)

_now = time.monotonic


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
            how = f"was killed by signal {-exitcode} ({signal.Signals(-exitcode).name})"
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
    machines: int = 1,
    restarts: int = 0,
    timeout: float = TIMEOUT,
    env: Mapping[str, str] | None = None,
    show: bool = True,
) -> list[str]:
    """Run a Python script as `ranks` processes with torchrun; returns what each rank printed.

    torchrun tells each process who it is by environment variables: RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, a free port. The ranks see every GPU, also those that the notebook
    hid from itself; `helpers` can be imported; each rank uses one CPU thread.

    arguments  those of the script
    machines   how many torchrun processes to start here, each with `ranks` ranks, that find each
               other as those of as many machines would; the GPUs are dealt out to them, or hidden
               where they do not suffice for all
    restarts   how often torchrun may start the ranks anew after one has failed; what a rank printed
               each time is joined
    timeout    seconds after which all ranks are stopped
    env        more environment variables
    show       print each line as it comes, after "[rank] "
    Raises RankFailed with the traceback of the first rank that failed, TimeoutError after
    `timeout`, FileNotFoundError where there is no such script, TypeError or ValueError for a number
    of ranks, machines or restarts that is no int or too small.
    However it ends, also by an interrupt or because the notebook's process is killed, no process is
    left behind, not even one that a rank started in a session of its own (on Linux, `keeper`).
    """
    for name, value in (env or {}).items():
        of_type(f"env[{name!r}]", value, str)
    if not isinstance(script, (str, os.PathLike)) or "\0" in os.fspath(script):
        raise TypeError(f"script={shown(script)} must be the path of a Python file.")
    script = Path(script).resolve()
    if not script.is_file():
        raise FileNotFoundError(
            f"There is no script {script.name} here: run the cell that writes it first."
        )
    whole("ranks", ranks, 1, MOST_RANKS)
    real("timeout", timeout, above=0)
    whole("machines", machines, 1, MOST_MACHINES)
    whole("restarts", restarts, 0, MOST_RANKS)
    rendezvous = ["--standalone"] if machines == 1 else _meeting(machines)
    common = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--redirects=3"]
    program = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folders = [Path(name) / f"machine-{machine}" for machine in range(machines)]
        output = RankOutput(folders, ranks, show)
        processes = []
        try:
            for machine, folder in enumerate(folders):
                folder.mkdir()
                # Machines are numbered by their addresses; here an address is only a name.
                own = [f"--local-addr=127.0.0.{machine + 1}"] if machines > 1 else []
                options = [*rendezvous, *own, *common, f"--log-dir={folder}"]
                variables = environment(env)
                if machines > 1:
                    gpus.give_share(variables, machine, machines, ranks)
                processes.append(_torchrun([*options, *program], folder / REPORT, variables))
            _wait(processes, output, timeout)
        finally:
            for process in processes:
                _stop(process)
            output.read()
        codes = [process.returncode for process in processes]
        if any(codes):
            rank, exitcode, written = output.failure()
            code = next(code for code in codes if code)
            raise RankFailed(
                rank, ranks * machines, code if exitcode is None else exitcode, written
            )
        return output.texts


def _meeting(machines: int) -> list[str]:
    """Options for torchrun processes that find each other at a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free}"
    name = f"--rdzv-id=launch-{os.getpid()}-{free}"
    return [f"--nnodes={machines}", "--rdzv-backend=c10d", endpoint, name]


def _torchrun(options: list[str], report: Path, variables: dict[str, str]) -> subprocess.Popen:
    """One torchrun under a keeper, which writes its report to a file."""
    command = [sys.executable, keeper.__file__, str(GRACE)]
    # torchrun starts ranks by the Python of this variable, where it is set; so is torchrun here.
    command += [os.environ.get("PYTHON_EXEC", sys.executable)]
    command += ["-m", "torch.distributed.run", *options]
    with report.open("w") as file:
        return subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=keeper.die_with_parent,
        )


def _wait(processes: list[subprocess.Popen], output: RankOutput, timeout: float) -> None:
    """Until all have ended, or `GRACE` seconds after the first one that failed."""
    end, failed = _now() + timeout, None
    while any(process.poll() is None for process in processes):
        output.read()
        now = _now()
        if now > end:
            lines = [text.strip().splitlines() or ["nothing"] for text in output.texts]
            last = "; ".join(f"rank {rank}: {printed[-1]}" for rank, printed in enumerate(lines))
            raise TimeoutError(
                f"The ranks were not done after {timeout:g} seconds and were stopped: pass a "
                f"longer timeout, or find what they wait for. Last printed: {last}."
            )
        if failed is None and any(process.poll() for process in processes):
            failed = now
        if failed is not None and now > failed + GRACE:
            return
        time.sleep(POLL)


def environment(more: Mapping[str, str] | None) -> dict[str, str]:
    """The ranks' environment variables: this process's, what `launch` promises, and `more`."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    # Machines count their restarts each by itself. In a store that they share, ranks with different
    # counts would not find each other (pytorch/pytorch#135712).
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    gpus.show_all(variables)  # a notebook for one GPU hid the others from itself
    return variables | dict(more or {})


def _stop(process: subprocess.Popen) -> None:
    """End torchrun and every process that it started: by SIGTERM, and after `GRACE` by force.

    The keeper does it, in a limited time.
    """
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait()


class Failure(NamedTuple):
    """A failure in a torchrun: when, which rank, its exit code (negative: a signal)."""

    time: str
    rank: int
    exitcode: int


class RankOutput:
    """What the ranks of some machines print.

    `texts` is what each rank has printed so far, in all attempts; `shown` how many of its
    characters were shown. torchrun writes over the files of an attempt that it does not count (one
    that another machine ended), so what was in them is kept here.

    folders  one per machine, which torchrun writes its logs to
    ranks    of each machine
    show     print each line as it comes, after "[rank] "
    """

    def __init__(self, folders: Sequence[Path], ranks: int, show: bool):
        self.folders, self.ranks, self.show = folders, ranks, show
        count = len(folders) * ranks
        self.texts, self.shown = [""] * count, [0] * count
        self._before, self._now = [""] * count, [""] * count  # written over, in the files

    def _read(self, rank: int, name: str) -> list[str]:
        """The text of each attempt."""
        machine, local = divmod(rank, self.ranks)
        files = self.folders[machine].glob(f"*/attempt_*/{local}/{name}.log")
        attempts = {int(file.parts[-3].removeprefix("attempt_")): file for file in files}
        return [attempts[number].read_text(errors="replace") for number in sorted(attempts)]

    def read(self) -> None:
        """Read all that has been printed by now, and show the lines that are complete."""
        for rank in range(len(self.texts)):
            now = "".join(self._read(rank, "stdout"))
            if not now.startswith(self._now[rank]):
                self._before[rank] += self._now[rank]
            self._now[rank] = now
            self.texts[rank] = self._before[rank] + now
            complete = self.texts[rank].rfind("\n") + 1
            if self.show and complete > self.shown[rank]:
                for line in self.texts[rank][self.shown[rank] : complete].splitlines():
                    print(f"[{rank}] {line}", flush=True)
            self.shown[rank] = max(complete, self.shown[rank])

    def errors(self, rank: int) -> str:
        """The rank's error output of its last attempt, from its last traceback on."""
        text = "".join(self._read(rank, "stderr")[-1:])
        # torch puts the rank before each line.
        text = re.sub(rf"^\[rank{rank}\]:? ?", "", text, flags=re.MULTILINE)
        _, traceback, after = text.rpartition("Traceback (most recent call last)")
        # gloo's threads may abort after an error, and write one of their own.
        return traceback + after.partition("\nterminate called")[0] if traceback else text

    def failure(self) -> tuple[int | None, int | None, str]:
        """(rank, exit code, what it wrote) of the failure that caused the others.

        Each machine reports its own failures. A rank that only lost its neighbour is not the cause;
        of the others it is the earliest. Without a rank, the report of a machine.
        """
        reports = [(folder / REPORT).read_text(errors="replace") for folder in self.folders]
        found = [failed for report in reports for failed in failures(report)]
        if not found:
            return None, None, next(filter(None, reports), "")
        first = min(found, key=lambda failed: (self._is_consequence(failed), failed))
        return first.rank, first.exitcode, self.errors(first.rank)

    def _is_consequence(self, failed: Failure) -> bool:
        # torchrun ends the other ranks by SIGTERM once it sees a failure.
        return failed.exitcode == -signal.SIGTERM or bool(GONE.search(self.errors(failed.rank)))


def failures(report: str) -> list[Failure]:
    """Those in torchrun's report. What it calls the root cause is only the one that it saw first.

    It tells their time in whole seconds.
    """
    found = re.finditer(
        r"time\s*:\s*(\S+)\s.*?rank\s*:\s*(\d+)\s.*?exitcode\s*:\s*(-?\d+)", report, re.DOTALL
    )
    return [Failure(match[1], int(match[2]), int(match[3])) for match in found]

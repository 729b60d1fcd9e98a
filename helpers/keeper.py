"""Run a command and end with it every process that it started: `keeper.py GRACE COMMAND...`.

A rank may start processes in a session of their own, whose parent then ends: no process group and
no tree of processes leads to them any more. On Linux such orphans become children of the nearest
"subreaper" above them (prctl(2)), and this process is one. Elsewhere the tree as it is when the
command ends has to do. It is run as a script, and imports nothing of the course, so that it starts
at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # options of Linux's prctl(2)
KILL_SECONDS = 30.0  # how long a killed process may take to go; one in the kernel cannot be hurried


class Told(BaseException):
    """This process was told to end."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# What a child calls before its program starts: on Linux the kernel then sends it SIGTERM when its
# parent dies.
die_with_parent = _die_with_parent if sys.platform == "linux" else None


def keep(command: list[str], grace: float) -> int:
    """Run the command to its end and give its exit code, negative for the signal that killed it.

    grace  seconds that the command has to end after SIGTERM before all is killed
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _tell)
    family: set[psutil.Process] = set()
    process = subprocess.Popen(command, preexec_fn=die_with_parent)
    try:
        process.wait()
    except Told:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        family |= set(psutil.Process().children(recursive=True))
        process.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end(family)
    return process.wait()


def _tell(*_: object) -> None:
    raise Told


def _end(family: set[psutil.Process]) -> None:
    """Kill these processes and all below this one, and those that they still start meanwhile."""
    end = time.monotonic() + KILL_SECONDS
    while time.monotonic() < end:
        family |= set(psutil.Process().children(recursive=True))
        family = {process for process in family if _alive(process)}
        if not family:
            return
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(list(family), timeout=0.5)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    code = keep(sys.argv[2:], float(sys.argv[1]))
    if code < 0:  # end by the same signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)

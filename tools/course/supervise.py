"""Runs one command with limits and ends all that it started, grandchildren in own sessions too.

Started by path as `python supervise.py LIMITS COMMAND...`, where LIMITS is a JSON object: seconds,
bytes of memory of all processes together, number of processes, and bytes of a file. Prints one JSON
object when everything has ended: why, and the exit status. When its own stdin closes, because the
program that started it is gone, everything ends as well.

On Linux this process becomes the parent of every orphan among its descendants, so that a process
that left its group and its session is still found.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time

import psutil

ORPHANS_COME_TO_ME = 36  # PR_SET_CHILD_SUBREAPER of Linux
TICK = 0.2  # seconds between two looks
FREE = 512 * 2**20  # bytes that must stay free on the disk of temporary files


def main(limits: dict, command: list[str]) -> dict:
    """Run the command to its end, or to a limit. Gives {"why": ..., "status": ...}."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(ORPHANS_COME_TO_ME, 1, 0, 0, 0)
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _limit(limits),
    )
    why = None
    while why is None and process.poll() is None:
        gone, _, _ = select.select([sys.stdin], [], [], TICK)
        if gone and not sys.stdin.buffer.read1(1):
            why = "stopped"
        elif time.monotonic() - started > limits["seconds"]:
            why = "time"
        else:
            why = _too_much(limits)
    _end_all(process)
    return {"why": why, "status": process.returncode}


def _limit(limits: dict) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
    # Memory that is written to, of one process: what a library only reserves does not count.
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (limits["memory"], limits["memory"]))


def _too_much(limits: dict) -> str | None:
    """Why the descendants of this process have to end, or None."""
    held, count = 0, 0
    for child in psutil.Process().children(recursive=True):
        try:
            held += child.memory_info().rss
            count += 1
        except psutil.Error:
            continue
    if held > limits["memory"]:
        return "memory"
    if count > limits["processes"]:
        return "processes"
    if shutil.disk_usage(limits["folder"]).free < FREE:
        return "disk"
    return None


def _end_all(process: subprocess.Popen) -> None:
    """Kill the group, then whatever is left among the descendants, until none is."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    until = time.monotonic() + 10
    while time.monotonic() < until:
        left = psutil.Process().children(recursive=True)
        for child in left:
            try:
                child.kill()
            except psutil.Error:
                pass
        if process.poll() is None:
            process.kill()
        if not _reap(process) and not left:
            return
        time.sleep(0.02)


def _reap(process: subprocess.Popen) -> bool:
    """Whether there are children; those that ended are taken leave of."""
    process.poll()
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not ended:
            return True
        if ended == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), sys.argv[2:])))

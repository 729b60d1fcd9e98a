"""Runs one command with limits and ends all that it started, grandchildren in own sessions too.

Started by path as `python supervise.py LIMITS COMMAND...`, where LIMITS is a JSON object: seconds,
bytes of memory of all processes together, number of processes, bytes of files that it writes, the
descriptor of the file for its progress, whether it runs isolated (`alone`), and which folders it
then finds empty. Prints one JSON object when everything has ended: why, and the exit status. When
its own stdin closes, because the program that started it is gone, everything ends as well.

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
    started, why, status = time.monotonic(), None, None
    child = _start(limits, command)
    while why is None and status is None:
        gone, _, _ = select.select([sys.stdin], [], [], TICK)
        if gone and not sys.stdin.buffer.read1(1):
            why = "stopped"
        elif time.monotonic() - started > limits["seconds"]:
            why = "time"
        else:
            why = _too_much(limits)
        ended, code = os.waitpid(child, os.WNOHANG)
        status = code if ended else None
    ended = _end_all(child)
    status = _status(status if status is not None else ended)
    if limits["alone"] and why is None:
        why = _limit_of_the_isolation(status)
    return {"why": why, "status": status}


def _start(limits: dict, command: list[str]) -> int:
    """The process that becomes the command, with nothing of this one but its progress."""
    if limits["alone"]:
        from tight_fit import isolation

        child = isolation.fork(
            keep=[limits["progress"]],
            reached=(os.path.join(limits["folder"], "exercises"),),
            hidden=tuple(limits["hidden"]),
            memory=limits["memory"],
            files=limits["file"],
        )
    else:
        child = os.fork()
    if child:
        return child
    try:
        if not limits["alone"]:
            os.setsid()
            _limit(limits)
        else:  # files lie in memory, but for that of the progress
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        os.execv(command[0], command)
    finally:
        os._exit(127)


def _limit(limits: dict) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
    # Memory that is written to, of one process: what a library only reserves does not count.
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (limits["memory"], limits["memory"]))


def _limit_of_the_isolation(status: int | None) -> str | None:
    from tight_fit import isolation

    return {isolation.TOO_MANY: "processes", isolation.TOO_LARGE: "memory"}.get(status or 0)


def _status(code: int | None) -> int | None:
    """The exit status of the command, negative for a signal; an isolated one gives 128 + signal."""
    if code is None:
        return None
    status = os.waitstatus_to_exitcode(code)
    return 128 - status if 128 < status < 193 else status


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


def _end_all(child: int) -> int | None:
    """Kill the group, then whatever is left among the descendants, until none is.

    Gives how the child ended, None where that was known before.
    """
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    status = None
    until = time.monotonic() + 10
    while time.monotonic() < until:
        left = psutil.Process().children(recursive=True)
        for one in left:
            try:
                one.kill()
            except psutil.Error:
                pass
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == child else status
        except ChildProcessError:
            if not left:
                break
        time.sleep(0.02)
    return status


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), sys.argv[2:])))

"""What a folder holds, which processes there are, and that none outlives the one that made it."""

import hashlib
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def digest(folder: Path) -> dict[str, tuple]:
    """{path: (mode, owner, time of the last change, digest)} of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        marks = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(marks.st_mode) else b""
        held = marks.st_mode, marks.st_uid, marks.st_mtime_ns, hashlib.sha256(content).hexdigest()
        found[str(path.relative_to(folder))] = held
    return found


def with_mark(mark: str) -> list[psutil.Process]:
    """The processes whose command line holds a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def heeding(how: int) -> Callable[[], object] | None:
    """A `preexec_fn` by which a process ends at this signal, also where nohup started the tests."""
    return None if how == signal.SIGKILL else lambda: signal.signal(how, signal.SIG_DFL)


def ends_with_all(process: subprocess.Popen, how: int, mark: str, *made: Path) -> None:
    """End a process by a signal: within a minute no other that bears the mark is left, and nothing
    of what it made."""
    process.send_signal(how)
    process.communicate(timeout=60)
    until = time.monotonic() + 60
    while (with_mark(mark) or any(path.exists() for path in made)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not with_mark(mark) and not any(path.exists() for path in made)

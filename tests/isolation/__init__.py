"""Which processes there are."""

import signal
from collections.abc import Callable

import psutil


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

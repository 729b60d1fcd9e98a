"""What an isolated process may take of the machine beside its files: processes and memory.

The first process of its namespace looks often, and ends with all that it has where it is too much.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

TASKS = 4096  # processes and threads that may run beside those of the machine
SMALLEST = 20  # the machine keeps 1 / SMALLEST of its memory
TICK = 0.1  # seconds between two looks
TOO_MANY, TOO_LARGE = 201, 202  # exit statuses


class MachineLimits:
    """Counts the tasks and the available memory of the machine, by files of /proc held open."""

    def __init__(self):
        self.files = [os.open(f"/proc/{name}", os.O_RDONLY) for name in ("loadavg", "meminfo")]
        self.tasks = self._tasks()
        self.available = self._memory("MemAvailable")
        self.least = min(self.available // 2, self._memory("MemTotal") // SMALLEST)

    def _tasks(self) -> int:
        return int(os.pread(self.files[0], 256, 0).split()[3].split(b"/")[1])

    def _memory(self, name: str) -> int:
        for line in os.pread(self.files[1], 4096, 0).splitlines():
            if line.startswith(name.encode() + b":"):
                return int(line.split()[1]) << 10
        raise OSError(f"/proc/meminfo names no {name}")

    def limit_tasks(self) -> None:
        """Let the system refuse more to a user that is not root."""
        import resource  # which not every system has

        most = self.tasks + TASKS
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    def until_end_of(self, child: int) -> NoReturn:
        """Take leave of every process that ends here; end as that one does, or at a limit.

        Signals are blocked by then.
        """
        for place, file in enumerate(self.files):
            os.dup2(file, place)  # who reads from what was here learns of its end
        self.files = [0, 1]
        os.closerange(2, os.sysconf("SC_OPEN_MAX"))
        while True:
            try:
                ended, status, _ = os.wait3(os.WNOHANG)
            except ChildProcessError:
                os._exit(1)
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
            if not ended:
                signal.sigtimedwait({signal.SIGCHLD}, TICK)
            if self._tasks() > self.tasks + TASKS:
                os._exit(TOO_MANY)
            if self._memory("MemAvailable") < self.least:
                os._exit(TOO_LARGE)


def go_first() -> None:
    """Let this process run before others where that is allowed: many that it starts are many."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        pass


def go_last() -> None:
    """Let this process run as others do, and be the first to end where memory is short."""
    try:
        if os.sched_getscheduler(0) == os.SCHED_RR:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        pass


def end_first() -> None:
    """Let this process, and those that it starts, be the first to end where memory is short."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass

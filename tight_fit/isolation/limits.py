"""What an isolated process may take of the machine beside its files: processes and memory.

The first process of its namespace looks often, and ends with all that it has where it is too much.
"""

from __future__ import annotations

import os
import signal

TASKS = 4096  # processes and threads that may run beside those of the machine
SMALLEST = 20  # the machine keeps 1 / SMALLEST of its memory
TICK = 0.1  # seconds between two looks
TOO_MANY, TOO_LARGE, TOO_FULL = 201, 202, 203  # exit statuses


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

    def until_end_of(self, child: int, folder: int | None = None, files: int = 0) -> int:
        """Take leave of every process that ends here; the exit status of that one, or of a limit.

        folder  an open folder: then SIGTERM is heeded, and the disk below it is watched
        files   bytes that its disk may lose
        Signals are blocked by then.
        """
        kept = [*self.files, *([] if folder is None else [folder])]
        for place, file in enumerate(kept):
            os.dup2(file, place)  # who reads from what was here learns of its end
        self.files = [0, 1]
        os.closerange(len(kept), os.sysconf("SC_OPEN_MAX"))
        least = None if folder is None else _least(2, files)
        heard = {signal.SIGCHLD} | ({signal.SIGTERM} if least else set())
        while True:
            try:
                ended, status, _ = os.wait3(os.WNOHANG)
            except ChildProcessError:
                return 1
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if not ended:
                got = signal.sigtimedwait(heard, TICK)
                if got is not None and got.si_signo == signal.SIGTERM:
                    return 128 + signal.SIGTERM
            if self._tasks() > self.tasks + TASKS:
                return TOO_MANY
            if self._memory("MemAvailable") < self.least:
                return TOO_LARGE
            if least and any(left < most for left, most in zip(_free(2), least)):
                return TOO_FULL


def _free(folder: int) -> tuple[int, int]:
    """Blocks and names that are left on the disk of an open folder."""
    disk = os.fstatvfs(folder)
    return disk.f_bavail, disk.f_favail


def _least(folder: int, files: int) -> tuple[int, int]:
    blocks, names = _free(folder)
    return max(blocks // 2, blocks - files // os.fstatvfs(folder).f_frsize), names // 2


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


def leave_no_core() -> None:
    """Let a crash be noted nowhere.

    The system's own handler of crashes, which is no part of this copy, is started at a limit of 0
    bytes as well; Linux starts none at 1 byte.
    """
    import resource  # which not every system has

    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    most = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))

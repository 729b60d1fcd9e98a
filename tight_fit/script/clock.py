"""How long a planned program may run, in seconds of its own CPU time, and what is said meanwhile.

A machine with other work does not end a plan that would have ended in time. A program that waits
takes no CPU time, and is ended all the same, unless it waits for a core that others have.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

TICK = 0.5  # seconds
WAITS = 60.0  # seconds without CPU time after which a program is taken to wait
WORKS = 0.01  # seconds of CPU time in a tick that are work
SCHEDULED = "/proc/self/schedstat"  # its second number: nanoseconds for which it waited for a core
CLEAR = "\r\x1b[K"
State = Callable[[FrameType | None], str]


class TooLong(BaseException):
    """The time for one run, in seconds, is over."""

    def __init__(self, seconds: float):
        super().__init__(seconds)
        self.seconds = seconds


class Clock:
    """Ends a program by TooLong, and tells a terminal what runs.

    seconds   of CPU time that the program may take, from `start` on
    terminal  open file to which a line is written each second, None for none
    """

    def __init__(self, seconds: float, terminal: int | None = None):
        self.seconds, self.terminal = seconds, terminal
        self.state: State = lambda frame: "starting"
        self._end = self._began = time.process_time()
        self._worked = self._said = time.monotonic()
        self._before = self._began
        try:
            self._scheduled = os.open(SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not Linux
            self._scheduled = -1

    def start(self) -> None:
        """The program starts."""
        self._began = self._before = time.process_time()
        self._end = self._began + self.seconds
        self._worked = time.monotonic()
        signal.signal(signal.SIGALRM, self._tick)
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, TICK, TICK)

    def stop(self) -> None:
        """Nothing is ended or said any more."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(self.terminal, "")

    def at_most(self, seconds: float) -> None:
        """What comes now may take so many seconds, of those that are left."""
        now = time.process_time()
        if now + seconds < self._end:
            self._end, self.seconds = now + seconds, seconds

    def _tick(self, number: int, frame: Any) -> None:
        used, now = time.process_time(), time.monotonic()
        wanted = used + self._kept_waiting()
        if wanted - self._before > WORKS:
            self._worked = now
        self._before = wanted
        if used >= self._end or now - self._worked > WAITS:
            raise TooLong(self.seconds if used >= self._end else used - self._began)
        if self.terminal is not None and now - self._said >= 1:
            self._said = now
            left = f"{used - self._began:.0f} s of CPU time, at most {self._end - used:.0f} s left"
            say(self.terminal, f"planning: {self.state(frame)}; {left}")

    def _kept_waiting(self) -> float:
        """Seconds for which other processes kept this one from a core, 0 where nobody counts."""
        try:
            return int(os.pread(self._scheduled, 99, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # closed by the program
            return 0.0


def say(terminal: int | None, text: str) -> None:
    """Write a line in place of the last one."""
    if terminal is not None:
        os.write(terminal, f"{CLEAR}{text[:120]}".encode())

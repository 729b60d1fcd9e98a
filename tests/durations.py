"""Which tests `make quick` leaves out: those that took longest when all were last timed.

`make durations` times every test and writes slow.tsv: a line per slow test, with its seconds of CPU
time. Of each test function the quickest parameters stay, up to a second together, so that none is
left out altogether because it has many. A test that the file does not know counts as quick.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from pathlib import Path

import pytest

SLOW = Path(__file__).with_name("slow.tsv")
FILES = 60  # that are listed at the end
SECONDS = 1.0  # of one test function with all its parameters, in `make quick`


def slow_tests(seconds: dict[str, float]) -> dict[str, float]:
    """{test: seconds} of the tests that are slow; `seconds` holds all, by pytest's node ids."""
    functions = defaultdict(list)
    for test, taken in seconds.items():
        functions[test.partition("[")[0]].append((taken, test))
    slow = {}
    for tests in functions.values():
        used = 0.0
        for taken, test in sorted(tests):
            used += taken
            if used > SECONDS:
                slow[test] = taken
    return slow


def read(path: Path = SLOW) -> dict[str, float]:
    """{test: seconds} of the slow tests, as last timed."""
    with path.open(encoding="utf8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {test: float(taken) for test, taken in rows}


def cpu_seconds() -> float:
    """Seconds of CPU time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


class Durations:
    """Adds up what setting up, calling and tearing down took, and writes slow.tsv at the end.

    Taken are seconds of CPU time, as other work on the machine changes the clock's.
    """

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self.before = cpu_seconds()

    def pytest_runtest_logstart(self):
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.before = now - self.before, now  # xdist sends what a report holds
        return report

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.cpu_seconds

    def pytest_sessionfinish(self, session, exitstatus):
        if hasattr(session.config, "workerinput"):
            return  # a worker: its reports reach the process that started it
        lines = [f"{test}\t{taken:.2f}\n" for test, taken in slow_tests(self.seconds).items()]
        SLOW.write_text("".join(sorted(lines)), encoding="utf8")

    def pytest_terminal_summary(self, terminalreporter):
        files: dict[str, float] = defaultdict(float)
        for test, taken in self.seconds.items():
            files[test.partition("::")[0]] += taken
        terminalreporter.section(f"{sum(files.values()):.0f} seconds of CPU time, by file")
        for file in sorted(files, key=files.__getitem__, reverse=True)[:FILES]:
            terminalreporter.write_line(f"{files[file]:8.1f} {file}")


def pytest_configure(config):
    """Registered by `-p tests.durations`."""
    config.pluginmanager.register(Durations())

"""How long tests take, and what follows: what waits, and which file begins first.

`make durations` times every test and lesson and writes slow.tsv, in seconds of CPU time: a line per
test that `make quick` leaves out, with "night" where `make test` leaves it to `make test-all` as
well, and one per file that takes long. Of each test function the quickest parameters stay, up to an
allowance, so that none is left out altogether because it has many. The allowance is the largest
with which all that stays takes `QUICK` or `DAY` seconds. A test that the file does not know counts
as quick, and one that was the first to notice a mutant (tools/mutants) never waits for the night.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.mutants import table

SLOW = Path(__file__).with_name("slow.tsv")
FILES = 100  # that are listed at the end
QUICK = 100.0  # seconds of all tests of `make quick`, beside those of starting and of `make lint`
DAY = 150.0  # seconds of all tests of `make test`, beside those and the lessons
LONG = 5.0  # seconds from which on a file has a line


def left_out(
    seconds: dict[str, float], allowed: float, kept: Set[str] = frozenset()
) -> dict[str, float]:
    """{test: seconds} of those that wait; `seconds` holds all, by pytest's node ids.

    What is `kept` stays whatever it takes, beside what is allowed.
    """
    functions = defaultdict(list)
    for test, taken in seconds.items():
        if test not in kept:
            functions[test.partition("[")[0]].append((taken, test))
    needed: list[tuple[float, float, str]] = []  # the allowance with which a test stays
    for tests in functions.values():
        used = 0.0
        for taken, test in sorted(tests):
            used += taken
            needed.append((used, taken, test))
    waiting, total = {}, 0.0
    for _, taken, test in sorted(needed):
        total += taken
        if total > allowed:
            waiting[test] = taken
    return waiting


def shares(seconds: dict[str, float], alone: dict[str, float]) -> dict[str, float]:
    """{test: seconds}, where what a file's tests share is divided among them.

    `seconds` counts it for the first of them, and `alone` for each.
    """
    files, sums = by_file(seconds), by_file(alone)
    return {
        test: taken * files[file_of(test)] / (sums[file_of(test)] or 1.0)
        for test, taken in alone.items()
    }


class Timed(NamedTuple):
    """What slow.tsv holds: {test: seconds}, those of them that wait for the night, and files."""

    slow: dict[str, float]
    night: set[str]
    files: dict[str, float]


def read(path: Path = SLOW) -> Timed:
    """What is slow, as last timed."""
    timed = Timed({}, set(), {})
    with path.open(encoding="utf8", newline="") as file:
        for name, taken, tier in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            (timed.files if tier == "file" else timed.slow)[name] = float(taken)
            if tier == "night":
                timed.night.add(name)
    return timed


def write(seconds: dict[str, float], alone: dict[str, float], path: Path = SLOW) -> None:
    """Choose what waits, and keep it."""
    tests = {test: taken for test, taken in alone.items() if ".py::" in test}
    night = left_out(shares(seconds, tests), DAY, killers())
    slow = left_out(tests, QUICK)
    rows = [(test, taken, "night" if test in night else "slow") for test, taken in slow.items()]
    rows += [(file, taken, "file") for file, taken in by_file(seconds).items() if taken >= LONG]
    path.write_text("".join(f"{a}\t{b:.2f}\t{c}\n" for a, b, c in sorted(rows)), "utf8")


def killers() -> set[str]:
    """The tests that were the first to notice a mutant."""
    return {row["by"] for row in table.rows() if row["killed"]}


def file_of(test: str) -> str:
    """The file of a test, by its node id."""
    return test.partition("::")[0]


def by_file(seconds: dict[str, float]) -> dict[str, float]:
    """{file: seconds}, the longest first."""
    files: dict[str, float] = defaultdict(float)
    for test, taken in seconds.items():
        files[file_of(test)] += taken
    return dict(sorted(files.items(), key=lambda item: -item[1]))


def cpu_seconds() -> float:
    """Seconds of CPU time of this process and of its children, with theirs that have ended.

    Of children that run (the fork server of ranks, a notebook's kernel) Linux tells it.
    """
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with suppress(OSError):  # it has ended, and counts below
                told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
                ticks += sum(map(int, told.split()[11:15]))  # after the name: see proc(5)
    return ticks / os.sysconf("SC_CLK_TCK") + sum(os.times()[:4])


class Durations:
    """Adds up what setting up, calling and tearing down took, and writes slow.tsv at the end.

    Taken are seconds of CPU time, as other work on the machine changes the clock's. What tests
    share (fixtures of a module or of all) counts for the first of them in the sum of its file, for
    each in the choice of what is quick (without the first, the next one would take as long), and
    in parts in the choice of what runs by day.
    """

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self.alone: dict[str, float] = defaultdict(float)  # of each test, were it the only one
        self.shared: dict[object, float] = {}  # of a fixture that several tests share
        self.before, self.made = cpu_seconds(), 0.0

    def pytest_runtest_logstart(self):
        self.before, self.made = cpu_seconds(), 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        before, made = cpu_seconds(), self.made
        value = yield
        taken, others = cpu_seconds() - before, self.made - made  # which this one asked for
        self.shared[fixturedef], self.made = taken - others, made + taken
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = cpu_seconds()
        # xdist sends what a report holds
        report.cpu_seconds, self.before = now - self.before, now
        report.shared_seconds = 0.0
        if call.when == "setup":
            asked = getattr(item, "_fixtureinfo", None)  # a cell of a notebook has none
            found = asked.name2fixturedefs.values() if asked else ()
            shared = sum(self.shared.get(fixtures[-1], 0.0) for fixtures in found)
            report.shared_seconds = shared - self.made
        return report

    def pytest_runtest_logreport(self, report):
        taken = getattr(report, "cpu_seconds", 0.0)  # none where the worker has ended
        self.seconds[report.nodeid] += taken
        self.alone[report.nodeid] += taken + getattr(report, "shared_seconds", 0.0)

    def pytest_sessionfinish(self, session, exitstatus):
        there = sum(1 for _ in SLOW.parent.rglob("test_*.py"))
        if hasattr(session.config, "workerinput") or len(by_file(self.seconds)) < there / 2:
            return  # a worker, whose reports reach the process that started it, or a few files
        if not any(self.seconds.values()):
            return  # workers that do not have this plugin time nothing
        write(self.seconds, self.alone)

    def pytest_terminal_summary(self, terminalreporter):
        files = by_file(self.seconds)
        terminalreporter.section(f"{sum(files.values()):.0f} seconds of CPU time, by file")
        for file, taken in list(files.items())[:FILES]:
            terminalreporter.write_line(f"{taken:8.1f} {file}")


def pytest_configure(config):
    """Registered by `-p tests.durations`."""
    config.pluginmanager.register(Durations())

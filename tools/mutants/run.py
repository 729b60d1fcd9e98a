"""Give every mutant to the tests that reach its line, the quickest first, until one of them fails.

A process that has imported PyTorch, transformers and pytest is forked for each run, in a copy of
the tree that holds the mutant. A mutant is killed by a test that fails or does not end with it, and
that passed when it was recorded and passes once more in a tree without a mutant.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tools.mutants import table
from tools.mutants.operators import Mutant
from tools.mutants.sample import ROOT, draw

WARM = (
    *("numpy", "pytest", "nbval.plugin", "hypothesis", "pandas", "matplotlib.pyplot"),
    *("torch", "torch.distributed.tensor", "transformers", "peft", "datasets"),
)
COLLECT = 1.0  # seconds that one more file costs, about
BATCHES = (6.0, 20.0, 60.0)  # seconds of tests in the first runs of a mutant, and in each later one
SLOWEST = (60.0, 8.0)  # a run does not end when it takes this long, and so many times as long
NO_TESTS = (4, 5)  # pytest's exit codes where a file, or every test that was asked for, is gone
KILLED = ("failed", "does not end")


class Reached:
    """Which tests reach a line, from what `reach` wrote."""

    def __init__(self, folder: Path) -> None:
        self.blocks = json.loads((folder / "blocks.json").read_text(encoding="utf8"))
        self.seconds: dict[str, float] = {}
        self.slow: set[str] = set()
        self.tests: dict[int, set[str]] = defaultdict(set)
        prepared: dict[tuple[int, str], None] = {}
        for path in sorted(folder.glob("reached-*.jsonl")):
            for row in map(json.loads, path.read_text(encoding="utf8").splitlines()):
                test = row["test"]
                if not row["passed"]:
                    continue  # nor can it kill a mutant
                self.seconds[test] = row["seconds"]
                self.slow |= {test} if row["slow"] else set()
                for block in row["call"]:
                    self.tests[block].add(test)
                for block in row["setup"]:  # a fixture, which the file's other tests may share
                    prepared[block, test.partition("::")[0]] = None
        files = defaultdict(set)
        for test in self.seconds:
            files[test.partition("::")[0]].add(test)
        for block, file in prepared:
            self.tests[block] |= files[file]

    def of(self, mutant: Mutant) -> set[str]:
        """The tests that reach the line, or the file where the line runs when it is imported."""
        numbers = [n for n, (file, _) in enumerate(self.blocks) if file == mutant.file]
        here = [n for n in numbers if any(a <= mutant.line <= b for a, b in self.blocks[n][1])]
        return {test for n in (here or numbers) for test in self.tests[n]}

    def batches(self, tests: set[str], file: str) -> Iterator[list[str]]:
        """The tests file by file, quick files and those of the mutant's own package first."""
        groups = defaultdict(list)
        for test in sorted(tests, key=lambda test: self.seconds[test]):
            groups[test.partition("::")[0]].append(test)
        own = own_package(file)

        def cost(name: str) -> float:
            return COLLECT + sum(self.seconds[test] for test in groups[name])

        batch: list[str] = []
        limits, spent = list(BATCHES), 0.0
        for name in sorted(groups, key=lambda name: cost(name) * (0.2 if own in name else 1)):
            if batch and spent + cost(name) > limits[0]:
                yield batch
                batch, spent = [], 0.0
                limits = limits[1:] or limits
            batch += groups[name]
            spent += cost(name)
        if batch:
            yield batch


class Tree:
    """A copy of the repository, in which one file at a time is another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")
        self.names = [name for name in names if name and (ROOT / name).is_file()]
        shutil.rmtree(folder, ignore_errors=True)
        self.restore()

    def restore(self) -> None:
        """Make every file again what it is in the repository."""
        for name in self.names:
            there, here = ROOT / name, self.folder / name
            if not here.exists() or _stamp(there) != _stamp(here):
                here.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(there, here)

    def put(self, mutant: Mutant) -> None:
        path = self.folder / mutant.file
        path.write_bytes(mutant.apply((ROOT / mutant.file).read_bytes()))


def _stamp(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size


class Chosen:
    """A plugin: only these tests, in this order, and what became of them in a file."""

    def __init__(self, tests: list[str], events: Path) -> None:
        self.place = {test: number for number, test in enumerate(tests)}
        self.events = events

    def pytest_collection_modifyitems(self, items):
        if any("::" in test for test in self.place):  # else they are files or folders
            items[:] = [item for item in items if item.nodeid in self.place]
            items.sort(key=lambda item: self.place[item.nodeid])

    def pytest_runtest_logstart(self, nodeid):
        self._write("began", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._write("failed", report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self._write("failed", report.nodeid)

    def _write(self, what: str, test: str) -> None:
        with self.events.open("a", encoding="utf8") as file:
            file.write(f"{what}\t{test}\n")


def run(tree: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """("passed", ""), ("failed", test), or ("does not end", test) of these tests in a tree.

    ("not there", "") where none of them is: a name that is gone, or a test of the night.
    """
    events = tree.with_suffix(".events")
    events.write_text("", encoding="utf8")
    child = os.fork()
    if not child:
        _test(tree, tests, events)
    end = time.monotonic() + SLOWEST[0] + SLOWEST[1] * seconds
    while not (status := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.05)
    told = [line.split("\t") for line in events.read_text(encoding="utf8").splitlines()]
    failed = [test for what, test in told if what == "failed"]
    if failed:
        return "failed", failed[0]
    if not status[0]:
        return "does not end", told[-1][1] if told else tests[0]
    if (code := os.waitstatus_to_exitcode(status[1])) in NO_TESTS:
        return "not there", ""
    return ("failed", told[-1][1] if told else tests[0]) if code else ("passed", "")


def _test(tree: Path, tests: list[str], events: Path) -> None:
    """Run pytest in this forked process, as if it had been started in the tree."""
    os.setsid()
    log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    for name in list(sys.modules):  # what was imported from the repository is without the mutant
        top = tree / name.partition(".")[0]
        if top.is_dir() or top.with_suffix(".py").is_file():
            del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    import pytest

    files = sorted({test.partition("::")[0] for test in tests})
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=short", "-m", "not night"]
    status = pytest.main([*options, *files], plugins=[Chosen(tests, events)])
    os._exit(int(status))


def killer(
    reached: Reached, tree: Tree, mutant: Mutant, tests: set[str], most: float
) -> tuple[str, str, int]:
    """(what became of a mutant, the test that killed it, how many tests there was no time for)."""
    left, spent = set(tests), 0.0
    for batch in reached.batches(tests, mutant.file):
        seconds = sum(reached.seconds[test] for test in batch)
        if spent and spent + seconds > most:
            break
        spent += seconds
        left -= set(batch)
        tree.put(mutant)
        how, test = run(tree.folder, batch, seconds)
        tree.restore()
        if how in KILLED:
            return how, test, len(left)
    return "survived", "", len(left)


def verify(results: Path, folder: Path) -> set[str]:
    """Run each test that killed a mutant without one: what fails here as well killed nothing."""
    rows = table.rows(results)
    tests = {row["by"] for row in rows if row["killed"] and "::" in row["by"]}
    reached, unsound = Reached(folder), set()
    tree = Tree(folder / "tree")
    while tests:
        how, test = run(
            tree.folder, sorted(tests), sum(reached.seconds.get(test, 10.0) for test in tests)
        )
        if how == "passed":
            break
        unsound.add(test)
        tests = {one for one in tests if one != test and one.partition("::")[0] != test}
    for row in rows:
        if row["by"] in unsound:
            row |= {"killed": False, "how": "fails without it too", "tier": 0}
            _append(results, row)
    return unsound


def tidy(results: Path, since: str = "") -> None:
    """Keep one line for every mutant that is still in the sample, with where it stands today.

    What lived before the day `since` begins anew with the fast tests.
    """
    rows = {table.name(row): row for row in table.rows(results)}
    for row in rows.values():
        if not row["killed"] and row.get("date", "") < since:
            row["tier"] = 0
    lines = [
        json.dumps(rows[mutant.name] | dataclasses.asdict(mutant)) + "\n"
        for _, mutant in draw(list(rows.values()))
        if mutant.name in rows
    ]
    results.write_text("".join(lines), encoding="utf8")


def again(results: Path, folder: Path, since: str, share: tuple[int, int]) -> None:
    """Give what was killed before the day `since` to its killer once more, in today's sources.

    What lives, or has lost that test, has no result any more, so that `work` takes it.
    """
    for name in WARM:
        __import__(name)
    tree = Tree(folder / f"tree{share[0]}")
    for number, row in enumerate(table.rows(results)):
        if number % share[1] != share[0] or not row["killed"] or row.get("date", "") >= since:
            continue
        mutant = Mutant(**{part.name: row[part.name] for part in dataclasses.fields(Mutant)})
        began = time.monotonic()
        how, test = "not there", ""
        if (ROOT / row["by"].partition("::")[0]).is_file():
            tree.put(mutant)
            how, test = run(tree.folder, [row["by"]], 60.0)
            tree.restore()
        row |= {"date": today(), "how": how, "killed": how in KILLED}
        row |= {"by": test or row["by"], "seconds": round(time.monotonic() - began, 1)}
        _append(results, row if row["killed"] else row | {"tier": 0})
        print(f"{number} {mutant.file}:{mutant.line} {mutant.operator}: {how} {test}", flush=True)


def own_package(file: str) -> str:
    """The folder of the tests of a source file."""
    return "/".join(["tests", *file.split("/")[1:-1]] if file.count("/") > 1 else ["tests", "core"])


def _append(results: Path, row: dict) -> None:
    with results.open("a", encoding="utf8") as file:
        file.write(json.dumps(row) + "\n")


def today() -> str:
    return datetime.date.today().isoformat()


def work(results: Path, folder: Path, tier: int, share: tuple[int, int], most: float) -> None:
    """Run this worker's share of the mutants that have no result of this tier yet."""
    for name in WARM:
        __import__(name)
    reached = Reached(folder)
    tree = Tree(folder / f"tree{share[0]}")
    rows = {table.name(row): row for row in table.rows(results)}
    for number, (part, mutant) in enumerate(draw(list(rows.values()))):
        row = {"part": part, **dataclasses.asdict(mutant), "date": today()}
        before = rows.get(mutant.name, {})
        due = not before.get("killed") and before.get("tier", 0) == tier - 1
        if number % share[1] != share[0] or not due:
            continue
        began, tests = time.monotonic(), reached.of(mutant)
        tests = tests & reached.slow if tier == 2 else tests - reached.slow
        how, test, left = killer(reached, tree, mutant, tests, most)
        row |= {"tier": tier, "tests": len(tests), "not run": left, "killed": how in KILLED}
        row |= {"how": how, "by": test, "seconds": round(time.monotonic() - began, 1)}
        _append(results, row)
        print(f"{number} {mutant.file}:{mutant.line} {mutant.operator}: {how} {test}", flush=True)

"""A plugin of pytest that writes down what every test reaches and how long it takes.

    PYTHONPATH=tools/mutants/hook python -m pytest tests -n 2 --dist loadfile -p tools.mutants.reach

Every block of a function of the planner and the course (a run of statements without a branch) gets
one more statement, which marks its byte of a map that all processes of a worker share. So forked
ranks and commands in processes of their own count as well, and only code of ours is slower. One
line of JSON per test goes to build/mutants/reached-*.jsonl at once, so that a run that was cut off
is of use. torch.compile cannot compile a function with marks: tests that ask for it fail in this
run.
"""

from __future__ import annotations

import ast
import builtins
import json
import marshal
import os
import re
import resource
import time
from mmap import mmap
from pathlib import Path

import pytest

from tools.mutants.hook import sitecustomize
from tools.mutants.hook.sitecustomize import CODE, MAP

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "mutants"
WATCHED = ("tight_fit", "helpers", "exercises")
COMPOUND = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Match)


def marked(source: str, file: str, blocks: list) -> ast.Module:
    """The module with marks at the beginning of every block of a function.

    `blocks` grows by [file, [[first line, last line], ...]] for each: its place is its number.
    """

    def body(statements: list[ast.stmt], inside: bool) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        lines = None  # those of the block that is open
        for statement in statements:
            if inside and lines is None and not _is_docstring(statement, done):
                lines = []
                mark = ast.parse(f"__reached__[{len(blocks)}] = 1").body[0]
                done += [ast.fix_missing_locations(_moved(mark, statement))]
                blocks.append([file, lines])
            if lines is not None:
                lines.append(_head(statement))
            within(statement, inside or isinstance(statement, ast.FunctionDef))
            done.append(statement)
            lines = None if isinstance(statement, COMPOUND) else lines
        return done

    def within(node: ast.AST, inside: bool) -> None:
        inside = inside and not isinstance(node, ast.ClassDef)
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, name, None), list) and statements:
                setattr(node, name, body(statements, inside))
        for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            part.body = body(part.body, inside)

    tree = ast.parse(source)
    tree.body = body(tree.body, False)
    return tree


def _is_docstring(statement: ast.stmt, before: list) -> bool:
    value = getattr(statement, "value", None)
    return not before and isinstance(value, ast.Constant) and isinstance(value.value, str)


def _moved(mark: ast.stmt, to: ast.stmt) -> ast.stmt:
    for node in ast.walk(mark):
        ast.copy_location(node, to)
    return mark


def _head(statement: ast.stmt) -> list[int]:
    """The lines of a statement, without those of the statements within it."""
    inner = getattr(statement, "body", None) or getattr(statement, "cases", None)
    if not isinstance(inner, list):
        return [statement.lineno, statement.end_lineno or statement.lineno]
    first = inner[0].pattern.lineno if hasattr(inner[0], "pattern") else inner[0].lineno
    begin = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
    return [begin, max(begin, first - 1)]


def write_code(folder: Path) -> list:
    """Keep the marked code of every watched file in `folder`, and give the blocks of all."""
    blocks: list = []
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(path for name in WATCHED for path in (ROOT / name).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        tree = marked(path.read_text(encoding="utf8"), name, blocks)
        code = compile(tree, str(path), "exec", dont_inherit=True)
        (folder / name.replace("/", "#")).write_bytes(marshal.dumps(code))
    return blocks


def pytest_configure(config):
    """Watch in every process that runs tests: a worker of xdist, or the only one."""
    if os.environ.get("PYTEST_XDIST_WORKER") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(ReachRecorder())


class ReachRecorder:
    """Writes a line per test: the seconds that it computes, and the blocks that it reaches."""

    def __init__(self) -> None:
        OUT.mkdir(parents=True, exist_ok=True)
        folder = OUT / f"code-{os.getpid()}"
        blocks = write_code(folder)
        (OUT / "blocks.json").write_text(json.dumps(blocks), encoding="utf8")
        place = OUT / f"map-{os.getpid()}"
        place.write_bytes(bytes(len(blocks)))
        os.environ |= {MAP: str(place), CODE: str(folder), sitecustomize.ROOT: str(ROOT)}
        sitecustomize.install()
        self.map: mmap = builtins.__reached__  # type: ignore[attr-defined]
        self.file = (OUT / f"reached-{os.getpid()}.jsonl").open("w", encoding="utf8", buffering=1)
        self.row: dict = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        slow = item.get_closest_marker("slow") is not None
        self.row = {"test": item.nodeid, "slow": slow, "passed": True, "seconds": 0.0}
        self.row |= {"setup": [], "call": []}
        self._taken()  # by imports and collecting
        result = yield
        self.file.write(json.dumps(self.row | {"seconds": round(self.row["seconds"], 3)}) + "\n")
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._phase("setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        return (yield from self._phase("call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item, nextitem):
        return (yield from self._phase("call"))

    def pytest_runtest_logreport(self, report):
        self.row["passed"] &= not report.failed

    def _phase(self, name: str):
        began = _computed()
        try:
            return (yield)
        finally:
            self.row["seconds"] += _computed() - began
            self.row[name] = sorted({*self.row[name], *self._taken()})

    def _taken(self) -> list[int]:
        """The blocks that were reached since the last call."""
        found = [mark.start() for mark in re.finditer(b"\x01", self.map[:])]
        for number in found:
            self.map[number] = 0
        return found


def _computed() -> float:
    """Seconds that this process and its ended children have computed."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime

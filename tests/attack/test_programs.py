"""Programs, snapshots and cells: files that are none, bad options, pickles that call.

Programs that cannot be planned are in tests/script/test_refused.py.
"""

import os
import pickle
from types import SimpleNamespace

import pytest
import torch

from tests.attack import command_refuses as refuses
from tests.attack import refused
from tight_fit.command import explain, magic
from tight_fit.command import script as command
from tight_fit.script.snapshot import moment, read

BLOCK = {"state": "active_allocated", "size": 5, "address": 1}
SEGMENT = {"device": 0, "total_size": 8, "blocks": [BLOCK]}


FILES = {
    "nul": (b"import torch\0\n", "null bytes"),
    "bytes": (bytes(range(256)), "is not Python"),
    "utf-16": ("import torch\n".encode("utf-16"), "is not Python"),
    "nested": (b"(" * 5000, "is not Python"),
    "an indent": (b"if 1:\nx", "is not Python"),
    "html": (b"<html>Not found</html>", "is not Python"),
    "an unknown encoding": (b"# coding: nonsense\n", "is not Python"),
}


@pytest.mark.parametrize("content, says", FILES.values(), ids=FILES)
def test_what_is_no_program(content, says, tmp_path, capsys):
    (tmp_path / "train.py").write_bytes(content)
    refuses(command.main, [str(tmp_path / "train.py"), "--gpu", "T4"], capsys, "train.py", says)


NO_FILES = [
    *((command.main, [typed, "--gpu", "T4"], says) for typed, says in (
        ("", "is empty"), (" ", "is empty"), (".", "is a folder"), ("no.py", "is not there"),
        ("\0", ""), ("x" * 9999, ""), ("~nosuchuser/x.py", "is not there"), ("a.ipynb", "%%plan"))),
    (command.main, ["accelerate", "launch", "train.py", "--gpu", "T4"],
     "train.py --gpu T4 --ranks 2"),
    (command.main, ["--", "torchrun", "--nproc_per_node", "2", "train.py"],
     "torchrun launches a program"),
    (explain.main, [""], "is not there"), (explain.main, ["."], "is a folder"),
    (explain.main, ["no.pickle"], "is not there"),
]  # fmt: skip


@pytest.mark.parametrize("main, typed, says", NO_FILES, ids=lambda value: repr(value)[:12])
def test_a_program_and_a_snapshot_are_files(main, typed, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "a.ipynb").write_text('{"cells": []}')
    refuses(main, typed, capsys, says)


OPTIONS = {
    "": "--gpu",
    "--gpu=": "gpu=''",
    "--gpu T5": "gpu='T5'",
    "--gpu -8GB": "expected one argument",
    "--gpu T4 --card L4": "give it once",
    "--gpu T4 --json --json": "give it once",
    "--gpu T4 --qick": "Did you mean --quick?",
    "--gpu T4 --batch 8": "unrecognized",
    "--gpu T4 more.py": "unrecognized",
    **{f"--gpu T4 --seconds={n}": "from 1 to 86,400"
       for n in ("", "0", "-1", "x", "nan", "1e9", "1.5", "9" * 999)},
}  # fmt: skip


@pytest.mark.parametrize("more, says", OPTIONS.items(), ids=lambda value: value[:30])
def test_options_of_a_program_s_plan(more, says, tmp_path, capsys):
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')")
    refuses(command.main, [str(tmp_path / "train.py"), *more.split()], capsys, says)


# -- snapshots


class Calls:
    """What a pickle makes of it is a call."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


BYTES = {
    "empty": b"",
    "text": b"hello",
    "binary": bytes(range(256)),
    "half": pickle.dumps({"segments": [SEGMENT] * 9})[:80],
    "a memo": b"\x80\x04h\x05.",
    "too long": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",
    **{repr(made): pickle.dumps(made) for made in (None, [], {}, torch.ones(1))},
}


@pytest.mark.parametrize("content", BYTES.values(), ids=BYTES)
def test_what_is_no_snapshot(content, tmp_path, capsys):
    (tmp_path / "x.pickle").write_bytes(content)
    refuses(explain.main, [str(tmp_path / "x.pickle")], capsys, "x.pickle")


def test_a_pickle_that_calls_is_not_obeyed(tmp_path, capsys):
    (tmp_path / "x.pickle").write_bytes(pickle.dumps({"segments": [Calls(tmp_path / "made")]}))
    refuses(explain.main, [str(tmp_path / "x.pickle")], capsys, "plain data only")
    assert not (tmp_path / "made").exists()


OOM = {"action": "oom", "size": 9, "device_free": 3}
NO_SIZES = (-5, "5", None, 1.5, float("nan"), 10**40)


def with_block(block):
    return {"segments": [{**SEGMENT, "blocks": [block]}]}


def with_event(event):
    return {"segments": [SEGMENT], "device_traces": [[event]]}


SNAPSHOTS = {
    "no segments": {"segments": []},
    "a number": {"segments": [1]},
    "an empty segment": {"segments": [{}]},
    "no blocks": {"segments": [{**SEGMENT, "blocks": []}]},
    "a block of text": with_block("x"),
    **{
        f"a block of {size!r:.9}": with_block({**BLOCK, "size": size}) for size in (True, *NO_SIZES)
    },
    **{
        f"a segment of {size!r:.9}": {"segments": [{**SEGMENT, "total_size": size}]}
        for size in NO_SIZES
    },
    **{f"an event of {size!r:.9}": with_event({**OOM, "size": size}) for size in NO_SIZES},
    "an event without size": with_event({"action": "oom"}),
    "an event of text": with_event("oom"),
    "traces of text": {"segments": [SEGMENT], "device_traces": {"a": 1}},
    "a device of text": {"segments": [{**SEGMENT, "device": "x"}], "device_traces": [[]]},
    "frames of numbers": with_block({**BLOCK, "frames": [3]}),
}


@pytest.mark.parametrize("snapshot", SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_fields_of_a_snapshot_are_pytorchs(snapshot, tmp_path):
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(snapshot))
    refused(ValueError, "the snapshot", lambda: moment(read(tmp_path / "x.pickle")))


# -- cells


OF_CELLS = {line: says for line, says in OPTIONS.items() if " --" not in line or "=" in line} | {
    "T4": "--gpu",
    "--gpu": "--gpu",
    "--gpu T4 --gpu L4": "give it once",
    "--gpu T4 --qick": "--qick",
    "--gpu 'T4": "quotation",
}


@pytest.mark.parametrize("line, says", OF_CELLS.items(), ids=lambda value: value[:30])
def test_a_cell_is_planned_with_options(line, says, capsys):
    ran = []
    shell = SimpleNamespace(user_ns={"ran": ran}, transform_cell=lambda cell: cell)
    magic.PlanMagics.plan(SimpleNamespace(shell=shell), line, "ran.append(1)")
    said = capsys.readouterr().out
    assert says in said and said.startswith("%%plan: ") and said.count("\n") == 1 and not ran

"""How a command ends, seen from the shell that started it."""

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tight_fit.command.wrapper import importing, run, sentence

ROOT = Path(__file__).parents[2]
HEAD = "import sys\nfrom tight_fit.command.wrapper import run\n"


def started(body: str, environment: dict[str, str] | None = None, **more):
    """A process whose `main` has this body."""
    source = HEAD + "def main():\n    " + body + "\nsys.exit(run(main, 'test'))\n"
    return subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        stderr=subprocess.PIPE,
        **more,
    )


def test_what_a_command_returns_is_its_status():
    assert [run(lambda status=status: status, "test") for status in (None, 0, 1, 7)] == [0, 0, 1, 7]


@pytest.mark.parametrize(
    "error, says",
    [
        (ValueError("x=3 is odd"), "test: error: x=3 is odd."),
        (MemoryError(), "test: error: this machine has too little memory for that: ask for less."),
        (RecursionError(), "test: error: the input is nested too deeply to be read."),
        (
            OSError(errno.EROFS, "Read-only file system", "/x/y"),
            "test: error: /x/y cannot be written: the disk is read-only: write to another folder.",
        ),
        (ModuleNotFoundError("No module named 'x'"), "test: error: No module named 'x'."),
    ],
)
def test_an_error_is_one_line(error, says, capsys):
    def main():
        raise error

    assert run(main, "test") == 2
    printed = capsys.readouterr()
    assert printed.err == f"{says}\n" and printed.out == ""


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0, "test")


def test_ctrl_c_is_one_line_and_130(capsys):
    def main():
        raise KeyboardInterrupt

    assert run(main, "test") == 130
    assert capsys.readouterr().err == "\nInterrupted: what was unfinished is not kept.\n"


def test_a_reader_that_goes_away_is_no_error_of_ours():
    reading, writing = os.pipe()
    os.close(reading)
    process = started("print('x' * 100_000)", stdout=writing)
    os.close(writing)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "wb") as full:
        process = started("print('x')", stdout=full)
        said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 2 and said.count("\n") == 1
    assert "no space left on the disk" in said


@pytest.mark.parametrize("encoding", ["ascii", "cp437", "latin-1"])
def test_what_an_encoding_lacks_is_replaced(encoding):
    process = started("print('3 × 4 → 12')", {"PYTHONIOENCODING": encoding}, stdout=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == b""
    assert b"12" in out and b"?" in out


def test_a_sentence_ends_with_a_full_stop_and_is_one_line():
    assert sentence(ValueError("a\n  b")) == "a b." and sentence(ValueError()) == "ValueError."


def test_only_a_process_of_a_commands_own_looks_at_no_import_again():
    """In a notebook's kernel what is frozen would be the reader's own."""

    def imports():
        before = gc.get_freeze_count()
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        return gc.get_freeze_count() - before

    gc.unfreeze()
    try:
        assert imports() == 0
        assert run(lambda: int(imports() < 1000), "name") == 0
        assert imports() == 0, "only while it runs"
    finally:
        gc.freeze()

"""Commands: interrupts, closed pipes, full disks, narrow encodings, outputs."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.attack import command_refuses, one_sentence
from tight_fit.command.wrapper import run
from tools.course import ROOT, build, kept_plans, stress
from tools.course import __main__ as course
from tools.course.leftovers import unfinished

QUICK = ("tight_fit", "tools.course", "benchmarks")  # import no PyTorch
# Started by path, by another file or by torchrun, or an example in a docstring.
STARTED_OTHERWISE = (
    "main.py", "gpu_layout_ranks.py", "keeper.py", "run_cells.py", "supervise.py", "wrapper.py",
)  # fmt: skip
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for package in ("tight_fit", "helpers", "benchmarks", "tools")
    for path in (ROOT / package).rglob("*.py")
    if 'if __name__ == "__main__"' in path.read_text(encoding="utf8")
    and path.name not in STARTED_OTHERWISE
)
NO_TORCH = "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"


def started(module: str, *arguments: str, code: str = "", **more) -> subprocess.Popen:
    """A command in a process of its own; `code` runs before it."""
    source = f"{code}\nimport runpy, sys\nsys.argv[1:] = {list(arguments)!r}\n"
    source += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    more.setdefault("env", USUAL)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    return subprocess.Popen([sys.executable, "-c", source], **{**streams, **more})


USUAL = {**os.environ, "PYTHONPATH": str(ROOT)}
HOMELESS = {name: value for name, value in USUAL.items() if name != "HOME"}


@pytest.mark.parametrize(
    "module, environment, encoding",
    [
        *((module, USUAL, "utf-8") for module in QUICK),
        (QUICK[1], HOMELESS | {"PYTHONIOENCODING": "ascii"}, "ascii"),
        (QUICK[0], USUAL | {"PYTHONIOENCODING": "utf-16"}, "utf-16"),
    ],
)
def test_help_is_quick_starts_nothing_and_prints_what_it_can(module, environment, encoding):
    process = started(module, "--help", code=NO_TORCH, env=environment, text=False)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and not err
    assert out.decode(encoding).startswith(f"usage: python -m {module}")


def test_every_command_is_wrapped():
    for module in MODULES:
        path = ROOT.joinpath(*module.split("."))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        after = path.read_text(encoding="utf8").partition('if __name__ == "__main__"')[2]
        assert any(call in after for call in ("run(", "run_command(", "entry(")), module


def test_a_closed_pipe_ends_a_command_in_silence():
    reading, writing = os.pipe()
    os.close(reading)
    process = started("tools.course", "--help", code=NO_TORCH, stdout=writing)
    os.close(writing)
    assert "Traceback" not in process.communicate(timeout=120)[1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        process = started("tight_fit", "--list-gpus", code=NO_TORCH, stdout=full)
        err = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    one_sentence(err, "no space left")


def test_an_interrupt_while_libraries_load_is_one_line():
    # What runs in the background does not listen to SIGINT by itself.
    slow = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Slow:\n    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n            print('loading', flush=True); time.sleep(60)\n"
        "            sys.exit('it was not interrupted')\n"
        "sys.meta_path.insert(0, Slow())"
    )
    process = started("tight_fit", "distilgpt2", "--gpu", "T4", "--quick", "--fresh", code=slow)
    try:
        assert process.stdout.readline() == "loading\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    one_sentence(err, "Interrupted")


FULL = "[Errno 28] No space left on device: 'a' -> '/tmp/b'"


def fails(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error, says",
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a"), "/a cannot be written"),
        (OSError(errno.EROFS, "Read-only file system", "/a"), "the disk is read-only"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), "this is not allowed"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up"),
        (MemoryError(), "too little memory"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (RuntimeError("Could not determine home directory."), "no home directory"),
        (ModuleNotFoundError("No module named 'torch'"), "No module named 'torch'"),
        (ValueError("several\n  lines\n"), "several lines."),
        (ValueError(), "ValueError."),
        (shutil.Error([("a", "/tmp/b", FULL)] * 900), "written: there is no space"),
        (UnicodeEncodeError("ascii", "×", 0, 1, "ordinal not in range"), "ascii"),
    ],
)
def test_a_fault_is_one_sentence(error, says, capsys):
    assert run(fails(error), "python -m x") == 2
    one_sentence(capsys.readouterr().err, says)


# -- outputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["run"], ["run", "02"], ["record", "--dry-run"]])
@pytest.mark.parametrize("name", ["", " ", "99", "../02", "٠٢", "x" * 5000])
def test_a_notebook_that_is_none_is_refused(command, name, capsys):
    assert course.main([*command, name]) == 1
    assert "There is no notebook" in capsys.readouterr().err


def test_plans_that_are_not_kept_are_refused(capsys):
    for groups in (["nothing"], [""], ["layouts", "Ladder"]):
        command_refuses(kept_plans.main, groups, capsys, "use layouts, searches")


def test_the_kinds_of_soak_are_those_of_its_module():
    assert course.KINDS == stress.KINDS


# -- what is left behind ---------------------------------------------------------------------------


def test_what_a_killed_command_left_is_removed_and_what_lives_stays(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, living, other = (
        tmp_path / name for name in (f"x-{gone.pid}-abc", f"x-{os.getppid()}-abc", "x-notes")
    )
    for folder in (dead, living, other):
        folder.mkdir()
        (folder / "file").touch()
    with unfinished(tmp_path, "x") as made:
        assert made.is_dir() and not dead.exists() and living.exists() and other.exists()
    assert not made.exists()


@pytest.mark.parametrize(
    "arguments, fault",
    [("run 00", errno.EROFS), ("record --dry-run 00 --out x/y", errno.ENOSPC)],
)
def test_a_checkout_that_cannot_be_written_is_one_sentence(
    arguments, fault, capsys, monkeypatch, tmp_path
):
    """Before the first notebook is executed."""

    def refuses(path, *_, **__):
        raise OSError(fault, os.strerror(fault), str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "fingerprint", lambda path: "never")
    monkeypatch.setattr("tools.course.execute.execute", None)
    monkeypatch.setattr(Path, "mkdir", refuses)
    assert course.main(arguments.split()) == 1
    one_sentence(capsys.readouterr().err, "cannot be written")

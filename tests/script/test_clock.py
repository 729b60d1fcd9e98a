"""How long a program may run, and what a terminal is told meanwhile."""

import os
import termios
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event

import pytest

from tests.script import HEAD, LOOP
from tight_fit.command import script as command
from tight_fit.gpus import find
from tight_fit.script import clock, process
from tight_fit.script.program import ProgramFailed, Refused, ToPlan, script_of

WAITS = f"{HEAD}import time\ntime.sleep(3)\nwhile True:\n    pass\n"


def said_while(text, program, seconds=20.0):
    read, write = os.pipe()
    path = program(text)
    try:
        process.plan(ToPlan(path, (), find("T4")), script_of(path, ()), seconds, terminal=write)
    finally:
        os.close(write)
        with os.fdopen(read, newline="") as lines:
            said = lines.read()
    return [line for line in said.split(clock.CLEAR) if line]


def test_a_terminal_is_told_of_line_step_and_time_left(program):
    text = LOOP.replace("for step", "import time\nfor step").replace(
        "    optimizer.zero_grad()\n", "    time.sleep(1.2)\n    optimizer.zero_grad()\n"
    )
    said = said_while(text, program)
    assert any(line.startswith("planning: train.py:9, step 1; ") for line in said), said
    assert any("step 2; " in line for line in said) and all(" s left" in line for line in said)


def test_a_program_has_no_terminal_to_write_to_or_to_set(program):
    """What it writes where its own lines are told comes without a terminal's commands."""
    text = f"""\
import os, termios
for number in os.listdir("/proc/self/fd"):
    assert not os.isatty(int(number)), number
for number in range(3, 1024):
    try: os.write(number, b"{chr(92)}r{chr(92)}x1b[K{chr(92)}x1b]0;a window{chr(92)}x07told")
    except OSError: pass
os._exit(0)
"""
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    path = program(text)
    try:
        with pytest.raises(ProgramFailed, match="ended without an answer"):
            process.plan(ToPlan(path, (), find("T4")), script_of(path, ()), 60.0, terminal=theirs)
        clock.say(theirs, "end")
        said = b""
        while b"end" not in said:
            said += os.read(ours, 1 << 16)
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"told" in said and b"]0;" not in said


def test_seconds_are_those_of_the_cpu(program):
    """Sleeping for three seconds does not end a program that may compute for two."""
    with pytest.raises(
        Refused, match="still running after 2 seconds of CPU time and 0 steps"
    ) as error:
        said_while(WAITS, program, seconds=2.0)
    assert str(error.value).startswith("train.py:8 "), "it was ended while it slept"


def test_a_program_that_waits_is_ended(program, monkeypatch):
    monkeypatch.setattr(clock, "WAITS", 1.5)
    with pytest.raises(Refused, match="see whether it ends or waits"):
        said_while(f"{HEAD}import time\ntime.sleep(600)\n", program, seconds=100.0)


def test_a_program_that_waits_for_a_core_is_not_ended(program, monkeypatch, tmp_path):
    """Others' work is pretended: what the kernel counts grows while the program sleeps."""
    counted, ended = tmp_path / "schedstat", Event()
    counted.write_text("0 0 1")

    def busy():
        for turn in count():
            counted.write_text(f"0 {turn * 10**9} 1")
            if ended.wait(0.3):
                return

    monkeypatch.setattr(clock, "WAITS", 1.5)
    monkeypatch.setattr(clock, "SCHEDULED", str(counted))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(busy)
        try:
            with pytest.raises(Refused, match="after 2 seconds of CPU time"):
                said_while(WAITS, program, seconds=2.0)
        finally:
            ended.set()


def test_nothing_is_told_without_a_terminal_or_with_json(program, capfd):
    path = program(LOOP)
    assert command.main([path, "--gpu", "T4", "--quick"]) == command.FITS
    assert command.main([path, "--gpu", "T4", "--json", "--progress"]) == command.FITS
    assert "planning" not in capfd.readouterr().err
    assert command.main([path, "--gpu", "T4", "--quick", "--progress"]) == command.FITS
    assert "planning: importing what train.py uses" in capfd.readouterr().err

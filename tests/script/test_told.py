"""What a program says of itself reaches its user as text, whatever it says, and ends."""

import os
import re

import pytest

from tests.script import LOOP, run
from tight_fit.command import script
from tight_fit.script.program import ProgramFailed

COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_what_terminals_take_for_commands_is_left_out_and_output_reaches_no_file(program, capsys):
    """Its standard output is a pipe: a file to which the command prints is not its own."""
    evil = "\\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\\x9b2J\\x1b[31m"
    with pytest.raises(ProgramFailed, match="gone é") as error:
        run(program(f'raise RuntimeError("{evil}gone é")\n'))
    assert not COMMANDS.search(str(error.value))
    text = (
        "import os\nassert os.readlink('/proc/self/fd/1').startswith('pipe:')\n"
        f"print('{evil}hello é\\n', flush=True)\n{LOOP}"
    )
    assert script.main([program(text), "--gpu", "T4", "--output", "--quick"]) == 0
    said = capsys.readouterr().out
    assert "hello é\n" in said and not COMMANDS.search(said)


def test_a_program_that_prints_without_end_fills_nothing(program):
    """And its last lines are shown where it dies."""
    text = "for number in range(10**6): print('x' * 99, number)\nimport os; os.abort()\n"
    with pytest.raises(ProgramFailed) as error:
        run(program(text))
    assert "SIGABRT" in str(error.value) and error.value.lines[-1].endswith(" 999999")


@pytest.mark.parametrize("answer", [b"[1]", b"not JSON", b"[" * (1 << 20)], ids=len)
def test_an_answer_of_the_program_s_own_making_is_none(answer, program):
    text = (
        "import os\nfor pipe in range(3, 60):\n"
        f"    try: os.write(pipe, {answer[:9]!r} * {max(1, len(answer) // 9)})\n"
        "    except OSError: pass\nos._exit(0)\n"
    )
    with pytest.raises(ProgramFailed, match="ended without an answer"):
        run(program(text))


def test_an_answer_without_end_is_not_kept(program, monkeypatch):
    """Nor output without end, where the program has closed the way to answer."""
    monkeypatch.setattr("tight_fit.script.process.LONGEST", 1 << 20)
    endless = (
        "import os\nfor pipe in range(3, 60):\n    try:\n"
        "        for _ in range(99): os.write(pipe, b'1' * (1 << 16))\n    except OSError: pass\n"
    )
    closed = "import os\nos.closerange(3, 1000)\nwhile True: os.write(1, b'x' * 60000)\n"
    for text in (endless, closed):
        with pytest.raises(ProgramFailed, match="ended without an answer"):
            run(program(text))


def test_a_program_that_multiplies_is_ended_and_told(program, monkeypatch):
    monkeypatch.setattr("tight_fit.isolation.limits.TASKS", 300)
    text = (
        "import threading\nthreading.stack_size(1 << 15)\nwait = threading.Event().wait\n"
        "for _ in range(900): threading.Thread(target=wait, args=(60,), daemon=True).start()\n"
        "wait(60)\n"
    )
    expected = "processes and threads" if os.geteuid() == 0 else "can't start new thread|processes"
    with pytest.raises(ProgramFailed, match=expected):
        run(program(text))

"""What a program says of itself reaches its user as text, whatever it says, and ends."""

import os
import re

import pytest

from tests.script import LOOP, run
from tight_fit.command import script
from tight_fit.script.program import ProgramFailed, Refused

COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_what_terminals_take_for_commands_is_left_out(program):
    text = 'raise RuntimeError("\\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\\x9b2Jgone é")\n'
    with pytest.raises(ProgramFailed, match="gone é") as error:
        run(program(text))
    assert not COMMANDS.search(str(error.value))


def test_what_a_program_prints_is_shown_as_text_and_reaches_no_file(program, capsys, tmp_path):
    """Its standard output is a pipe: a file to which the command prints is not its own."""
    text = (
        "import os\nassert os.readlink('/proc/self/fd/1').startswith('pipe:')\n"
        f"print('\\x1b]0;evil\\x07\\x1b[2J\\x1b[31mhello é\\n', flush=True)\n{LOOP}"
    )
    assert script.main([program(text), "--gpu", "T4", "--output", "--quick"]) == 0
    said = capsys.readouterr().out
    assert "hello é\n" in said and not COMMANDS.search(said)


@pytest.mark.parametrize("answer", [b"[1]", b"not JSON", b"", b"[" * (1 << 20), b'"x"'])
def test_an_answer_of_the_program_s_own_making_is_none(answer, program):
    text = (
        "import os\nfor pipe in range(3, 60):\n"
        f"    try: os.write(pipe, {answer[:9]!r} * {max(1, len(answer) // 9)})\n"
        "    except OSError: pass\nos._exit(0)\n"
    )
    with pytest.raises(ProgramFailed, match="ended without an answer"):
        run(program(text))


def test_an_answer_without_end_is_not_kept(program, monkeypatch):
    monkeypatch.setattr("tight_fit.script.process.LONGEST", 1 << 20)
    text = (
        "import os\nfor pipe in range(3, 60):\n    try:\n"
        "        for _ in range(99): os.write(pipe, b'1' * (1 << 16))\n    except OSError: pass\n"
    )
    with pytest.raises(ProgramFailed, match="ended without an answer"):
        run(program(text))


def test_a_program_that_lets_go_of_the_answer_and_prints_on_is_ended(program):
    text = "import os\nos.closerange(3, 1000)\nwhile True: os.write(1, b'x' * 60000)\n"
    with pytest.raises(ProgramFailed, match="ended without an answer"):
        run(program(text))


def test_an_error_that_cannot_say_what_it_is(program):
    text = "class Odd(Exception):\n    def __str__(self): raise ValueError('no')\nraise Odd\n"
    with pytest.raises(ProgramFailed, match=r"Odd: \(its text could not be made\)"):
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


def test_deepspeed_in_trainer_is_refused_with_a_way_on(program):
    """Not that mpi4py is missing: DeepSpeed looks for it where no launcher has set ranks."""
    pytest.importorskip("deepspeed")
    path = program(
        "import torch\n"
        "from transformers import Trainer, TrainingArguments\n"
        "model = torch.nn.Linear(8, 8)\n"
        "deep = {'zero_optimization': {'stage': 2}, 'train_micro_batch_size_per_gpu': 'auto'}\n"
        "args = TrainingArguments('out', max_steps=2, report_to=[], deepspeed=deep)\n"
        "Trainer(model, args, train_dataset=[{'x': torch.ones(8)}] * 8).train()\n"
    )
    with pytest.raises(Refused, match=r"^train\.py:\d starts DeepSpeed.*--layout fsdp=N") as said:
        run(path)
    assert "mpi4py" not in str(said.value)


def test_packed_sequences_are_refused_for_what_they_are(program):
    """Their lengths are data, and no parameter decides them."""
    path = program(
        "import torch\n"
        "lstm = torch.nn.LSTM(8, 8, batch_first=True).cuda()\n"
        "words = torch.rand(2, 5, 8).cuda()\n"
        "pack = torch.nn.utils.rnn.pack_padded_sequence\n"
        "lstm(pack(words, torch.tensor([5, 3]), batch_first=True))\n"
    )
    with pytest.raises(Refused, match=r"^train\.py:5: pack_padded_sequence is not planned: let"):
        run(path)


def test_fsdp_of_trainer_on_one_gpu_is_told_how_to_be_planned(program):
    path = program(
        "import torch\n"
        "from transformers import Trainer, TrainingArguments\n"
        "args = TrainingArguments('out', max_steps=2, report_to=[], fsdp='full_shard')\n"
        "Trainer(torch.nn.Linear(8, 8), args, train_dataset=[{'x': torch.ones(8)}] * 8).train()\n"
    )
    with pytest.raises(ProgramFailed, match=r"distributed training.*--layout fsdp=N"):
        run(path)

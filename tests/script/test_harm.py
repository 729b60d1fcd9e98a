"""A planned program that moves, removes and changes its user's files leaves them as they are."""

import hashlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.isolation import ends_with_all, heeding, with_mark
from tests.night import few_by_day
from tests.script import HEAD, LOOP, STEP, run
from tight_fit import isolation
from tight_fit.gpus import find
from tight_fit.script import process
from tight_fit.script.program import ProgramFailed, Refused, ToPlan, script_of

# What a program does before its training, beside best.pt, data/1.txt and data/2.txt. Each asserts
# that the program itself sees what it has done. More is tried of the process itself, in
# tests/isolation.
DEEDS = {
    "moves by pathlib": "Path('best.pt').rename('a.pt')\nassert not Path('best.pt').exists()\n"
    "Path('a.pt').replace('b.pt')\nassert Path('b.pt').read_text() == 'weights'\n",
    "renames a folder": "os.rename('data', 'prev')\nassert open('prev/2.txt').read() == 'two'\n"
    "os.mkdir('data')\nassert os.listdir('data') == []\n",
    "removes": "os.remove('best.pt')\nassert not os.path.exists('best.pt')\n"
    "open('best.pt', 'w').write('new')\nassert open('best.pt').read() == 'new'\n",
    # Its own files and folders go as they do without a plan.
    "has a temporary folder": "with tempfile.TemporaryDirectory() as folder:\n"
    "    os.mkdir(f'{folder}/a'); open(f'{folder}/a/x', 'w').write('x')\n"
    "assert not os.path.exists(folder)\n",
    "makes its folder anew": "for _ in range(3):\n    shutil.rmtree('out', ignore_errors=True)\n"
    "    os.makedirs('out/a'); open('out/a/x', 'w').write('x')\n"
    "shutil.rmtree('out')\nassert not os.path.exists('out')\nassert not os.path.lexists('out')\n",
}  # fmt: skip
IMPORTS = "import os, shutil, tempfile\nfrom pathlib import Path\n"


def state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """{path: (mode, time of the last change, digest)} of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        marks = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(marks.st_mode) else b""
        digest = hashlib.sha256(content).hexdigest()
        found[str(path.relative_to(folder))] = marks.st_mode, marks.st_mtime_ns, digest
    return found


def with_files(folder: Path) -> None:
    """What a user has."""
    (folder / "data").mkdir()
    for name, text in (("best.pt", "weights"), ("data/1.txt", "one"), ("data/2.txt", "two")):
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", DEEDS)
def test_a_program_sees_what_it_did_and_its_user_s_files_stay(name, program, tmp_path):
    with_files(tmp_path)
    path = program(f"{IMPORTS}{DEEDS[name]}{LOOP}")
    before = state(tmp_path)
    assert run(path)["fits"]
    assert state(tmp_path) == before


# Ways to start another program, which would change best.pt.
STARTS = {
    "a shell": "subprocess.run('git status; rm best.pt', shell=True)",
    "git that removes": "subprocess.run(['git', '-C', '.', 'clean', '-fdx'])",
    "os.system": "os.system('rm best.pt')",
    "posix_spawn": "os.waitpid(os.posix_spawn('/bin/rm', ['rm', 'best.pt'], {}), 0)",
    "exec": "os.execvp('rm', ['rm', 'best.pt'])",
    "spawn": "os.spawnlp(os.P_WAIT, 'rm', 'rm', 'best.pt')",
    "a terminal": "import pty; pty.spawn(['rm', 'best.pt'])",
    "a thread": "import threading\n"
    "one = threading.Thread(target=subprocess.run, args=(['rm', 'best.pt'],))\n"
    "one.start(); one.join(); os.system('true')",
    "asyncio": "import asyncio\n"
    "asyncio.run(asyncio.create_subprocess_exec('rm', 'best.pt'))",
}  # fmt: skip


COPIES = {"spawn", "a terminal"}  # which the program makes of itself: one process is planned


@pytest.mark.parametrize("name", STARTS)
def test_another_program_changes_no_file_either(name, program, tmp_path):
    with_files(tmp_path)
    subprocess.run("git init -q && git add .", shell=True, check=True)
    path = program(f"{IMPORTS}import subprocess\n{STARTS[name]}\n{LOOP}")
    before = state(tmp_path)
    if name in COPIES:
        with pytest.raises(Refused, match=r"train.py:\d+: the program starts processes of its own"):
            run(path)
    elif name == "exec":  # after which there is no program any more
        with pytest.raises(ProgramFailed, match="ended without an answer"):
            run(path)
    else:
        assert run(path)["fits"]
    assert state(tmp_path) == before


# Writers that are not Python's, and what a user would miss.
WRITERS = {
    "a database": "import sqlite3\nsqlite3.connect('new.db').execute('create table x (y)')\n",
    "a tokenizer": "from transformers import AutoTokenizer\n"
    "AutoTokenizer.from_pretrained(MINI).save_pretrained('data')\n"
    "assert os.path.exists('data/tokenizer.json')\n",
    "Parquet": "import pyarrow, pyarrow.parquet\n"
    "pyarrow.parquet.write_table(pyarrow.table({'x': [1]}), 'best.pt')\n",
}  # fmt: skip
MINI = Path(__file__).parents[2] / "helpers" / "mini" / "deberta"


@pytest.mark.parametrize("name", WRITERS)
def test_writers_in_compiled_code_change_no_file(name, program, tmp_path):
    with_files(tmp_path)
    head = f"{IMPORTS}import torch\nMINI = {str(MINI)!r}\n"
    path = program(f"{head}{WRITERS[name]}{LOOP}")
    before = state(tmp_path)
    assert run(path)["fits"]
    assert state(tmp_path) == before


def test_a_folder_that_the_program_writes_to_shows_what_was_there(program, tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(40):
        (tmp_path / "data" / f"{number}.txt").write_text("x")
    text = "import glob\nopen('data/new.txt', 'w').write('x')\n"
    assert run(program(f"{text}assert len(glob.glob('data/*.txt')) == 41\n{LOOP}"))["fits"]


def test_nothing_is_sent_and_what_would_be_pushed_is_not(program):
    """Functions of the hub that were imported before a plan began, a plain socket, a log-out."""
    text = """\
import socket
from huggingface_hub import HfApi, create_repo, upload_folder
create_repo("nobody/nothing"); upload_folder(repo_id="nobody/nothing", folder_path=".")
for send in (
    lambda: HfApi().delete_repo("nobody/nothing"),
    lambda: socket.create_connection(("127.0.0.1", 80), timeout=5),
    lambda: socket.create_connection(("192.0.2.1", 80), timeout=5),
):
    try: send()
    except Exception as error: print(type(error))
    else: assert False
"""
    assert run(program(text + LOOP))["fits"]


def test_what_is_on_no_disk_is_refused_with_what_to_do(program):
    text = "from transformers import AutoModel\nAutoModel.from_pretrained('nobody/nothing')\n"
    with pytest.raises(Refused, match=r"train.py:2 needs what the hub's cache does not hold here"):
        run(program(text + LOOP))


def test_a_program_that_prints_without_end_fills_nothing(program):
    """And its last lines are shown where it dies."""
    text = "for number in range(10**6): print('x' * 99, number)\nimport os; os.abort()\n"
    with pytest.raises(ProgramFailed) as error:
        run(program(text))
    assert "SIGABRT" in str(error.value) and error.value.lines[-1].endswith(" 999999")


@pytest.mark.parametrize("how", few_by_day([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], 3))
def test_nothing_stays_where_the_command_is_ended(how, program, tmp_path):
    mark = f"mark-{os.getpid()}-{how}"
    text = (
        "import subprocess, sys, time\n"
        f"code = 'import os, time; os.setsid(); time.sleep(600)  # {mark}'\n"
        "subprocess.Popen([sys.executable, '-c', code])\n"
        "print('began', flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "tight_fit", "script", program(text), "--gpu", "T4"]
    environment = {**os.environ, "PYTHONPATH": str(MINI.parents[2])}
    options = {"stdout": subprocess.PIPE, "env": environment, "preexec_fn": heeding(how)}
    process = subprocess.Popen([*command, "--output", "--", mark], **options)
    assert process.stdout is not None and process.stdout.readline() == b"began\n"
    assert len(with_mark(mark)) >= 3
    ends_with_all(process, how, mark)


def test_in_a_locked_container_nothing_runs_without_trust(program, tmp_path):
    """One sentence; and where the program is trusted, the answer says that it was not isolated."""
    path = program(f"open('best.pt', 'w')\n{LOOP}")
    (tmp_path / "best.pt").write_text("weights")
    before = state(tmp_path)
    command = [sys.executable, "-m", "tests.isolation.locked", "-m", "tight_fit", "script", path]
    environment = {**os.environ, "PYTHONPATH": str(MINI.parents[2]), "NO_LANDLOCK": "1"}

    def ended(*options: str):
        return subprocess.run(
            [*command, "--gpu", "T4", "--quick", *options],
            capture_output=True,
            text=True,
            env=environment,
        )

    refused = ended()
    assert refused.returncode == 2 and refused.stdout == "" and state(tmp_path) == before
    assert refused.stderr.count("\n") == 1
    assert "(namespaces of its own: Operation not permitted; no Landlock" in refused.stderr
    assert ": with --trust" in refused.stderr
    trusted = ended("--trust")
    assert trusted.returncode == 0 and (tmp_path / "best.pt").read_text() == "", trusted.stderr
    assert "Note: The program was trusted, not isolated (namespaces" in trusted.stdout


def without_isolation(monkeypatch):
    def refused(*given, **options):
        raise isolation.Unavailable("namespaces of its own: Operation not permitted")

    monkeypatch.setattr(isolation, "fork", refused)
    monkeypatch.setattr(isolation, "fork_on_copy", refused)


def test_a_trusted_program_writes_but_no_weights(program, tmp_path, monkeypatch):
    without_isolation(monkeypatch)
    (tmp_path / "best.pt").write_text("weights")
    path = program(
        f"open('ran', 'w')\n{HEAD}torch.save(model, 'best.pt')\nassert torch.load('best.pt')\n"
        f"while True:\n{STEP}"
    )
    asked = ToPlan(path, (), find("T4"))
    assert process.plan(asked, script_of(path, ()), 60.0, trust=True)["fits"]
    assert (tmp_path / "ran").exists() and (tmp_path / "best.pt").read_text() == "weights"


def test_git_and_the_system_are_asked_as_ever(program, tmp_path):
    """What reads is started, and code that does without a program that is missing goes on."""
    text = (
        "import subprocess, platform\n"
        "said = subprocess.check_output(['git', '--version'], text=True)\n"
        "assert said.startswith('git version') and platform.processor() is not None\n"
        "try:\n    subprocess.run(['nvidia-smi'])\n"
        "except FileNotFoundError as error: assert error.errno == 2\n"
    )
    assert run(program(text + LOOP))["fits"]


def test_a_trainer_that_pushes_is_planned(program, tiny):
    """Each save would push; its repository is made when the trainer is."""
    text = f"""\
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
model = AutoModelForSequenceClassification.from_pretrained({str(tiny / "bert")!r}, num_labels=2)
rows = [{{"input_ids": torch.ones(8, dtype=torch.long), "labels": 0}} for _ in range(64)]
arguments = TrainingArguments("out", push_to_hub=True, hub_strategy="every_save", save_steps=1,
    hub_model_id="nobody/nothing", report_to="none", save_strategy="steps")
Trainer(model, arguments, train_dataset=rows).train()
"""
    assert run(program(text))["fits"]

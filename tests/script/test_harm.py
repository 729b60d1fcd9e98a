"""A planned program that changes its user's files leaves them as they are, in each isolation."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.isolation import digest
from tests.script import HEAD, LOOP, STEP, run
from tests.small import ROOT, python
from tight_fit import isolation
from tight_fit.isolation import landlock
from tight_fit.script.program import ProgramFailed, Refused

NOTE = "The program ran on a copy of its folder"
# What a program does before its training, and that it sees itself what it has done. Each deed by
# itself is in tests/isolation/test_deeds.py.
DEEDS = f"""\
import glob, os, platform, shutil, subprocess, tempfile, threading
from pathlib import Path
import pyarrow, pyarrow.parquet
from transformers import AutoTokenizer
(Path(__file__).resolve().parent / 'beside.txt').write_text('x')
assert os.path.exists('beside.txt')
open('data/new.txt', 'w').write('x')
assert len(glob.glob('data/*.txt')) == 41
Path('best.pt').rename('b.pt')
assert not Path('best.pt').exists() and Path('b.pt').read_text() == 'weights'
with tempfile.TemporaryDirectory() as folder:
    os.mkdir(f'{{folder}}/a'); open(f'{{folder}}/a/x', 'w').write('x')
assert not os.path.exists(folder)
for _ in range(3):
    shutil.rmtree('out', ignore_errors=True)
    os.makedirs('out/a'); open('out/a/x', 'w').write('x')
shutil.rmtree('out')
# Writers in compiled code.
pyarrow.parquet.write_table(pyarrow.table({{'x': [1]}}), 'kept.pt')
AutoTokenizer.from_pretrained({str(ROOT / "helpers/mini/deberta")!r}).save_pretrained('data')
assert os.path.exists('data/tokenizer.json')
# Other programs: those that read, one that is missing, and those that remove. What they name is in
# the user's own folder as well, which they would change if they ran there.
assert subprocess.check_output(['git', '--version'], text=True).startswith('git version')
assert platform.processor() is not None
try: subprocess.run(['nvidia-smi'])
except FileNotFoundError as error: assert error.errno == 2
subprocess.run('git status; rm kept.pt', shell=True)
subprocess.run(['git', '-C', '.', 'clean', '-fdx'])
os.system('rm last.pt')
os.waitpid(os.posix_spawn('/bin/rm', ['rm', 'train.py'], {{}}), 0)
one = threading.Thread(target=subprocess.run, args=(['rm', '-r', 'data'],))
one.start(); one.join()
import asyncio
asyncio.run(asyncio.create_subprocess_exec('rm', 'b.pt', 'best.pt'))
"""


@pytest.fixture
def files(tmp_path, program) -> Path:
    """What a user has, beside the program and under git."""
    (tmp_path / "data").mkdir()
    for number in range(40):
        (tmp_path / "data" / f"{number}.txt").write_text(str(number))
    for name in ("best.pt", "last.pt", "kept.pt"):
        (tmp_path / name).write_text("weights")
    subprocess.run("git init -q && git add .", shell=True, check=True, cwd=tmp_path)
    return tmp_path


def no_namespaces(*_, **__):
    raise isolation.Unavailable("namespaces of its own: Operation not permitted")


@pytest.fixture
def on_copy(monkeypatch):
    if landlock.version() < landlock.LEAST:
        pytest.skip("no Landlock that keeps signals in")
    monkeypatch.setattr(isolation, "fork", no_namespaces)


@pytest.fixture(params=["namespaces", "a copy"])
def isolated(request):
    if request.param == "a copy":
        request.getfixturevalue("on_copy")
    return request.param


def test_a_program_sees_what_it_did_and_its_user_s_files_stay(isolated, program, files):
    path = program(DEEDS + LOOP)
    before = digest(files)
    facts = run(path)
    assert facts["fits"]
    assert any(NOTE in note for note in facts["notes"]) is (isolated == "a copy")
    assert digest(files) == before


@pytest.mark.parametrize(
    "start, error, says",
    [
        ("import pty; pty.spawn(['rm', 'best.pt'])", Refused, "train.py:2: the program starts"),
        ("os.execvp('rm', ['rm', 'best.pt'])", ProgramFailed, "ended without an answer"),
    ],
    ids=["a copy of itself", "in its own place"],
)
def test_a_program_that_becomes_another_is_not_planned(start, error, says, program, files):
    path = program(f"import os\n{start}\n{LOOP}")
    before = digest(files)
    with pytest.raises(error, match=says):
        run(path)
    assert digest(files) == before


def test_a_plan_is_the_same_on_a_copy(program, tiny, monkeypatch):
    """Of a Trainer that saves and would push with each step, and of a loop with workers."""
    if isolation.why_not() is not None or landlock.version() < landlock.LEAST:
        pytest.skip("only one of the two isolations is here")
    trainer = f"""\
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
model = AutoModelForSequenceClassification.from_pretrained({str(tiny / "bert")!r}, num_labels=2)
rows = [{{"input_ids": torch.ones(8, dtype=torch.long), "labels": 0}} for _ in range(64)]
arguments = TrainingArguments("out", push_to_hub=True, hub_strategy="every_save", save_steps=1,
    hub_model_id="nobody/nothing", report_to="none", save_strategy="steps")
Trainer(model, arguments, train_dataset=rows).train()
"""
    workers = f"""\
from torch.utils.data import DataLoader, TensorDataset
{HEAD}torch.save(model, 'best.pt'); torch.load('best.pt', weights_only=False)
for (x,) in DataLoader(TensorDataset(torch.rand(64, 256)), batch_size=8, num_workers=2):
    model(x.to(device)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    for text in (trainer, workers):
        path = program(text)
        expected = run(path)
        with monkeypatch.context() as patched:
            patched.setattr(isolation, "fork", no_namespaces)
            found = run(path)
        found["notes"] = [note for note in found["notes"] if NOTE not in note]
        assert found == expected and expected["fits"]


def test_a_path_outside_its_folder_is_named_with_what_to_do(program, tmp_path, on_copy):
    path = program(f"open({str(tmp_path.parent / 'x')!r}, 'w')\n{LOOP}")
    with pytest.raises(Refused, match=r"train.py:1: .*Permission denied.*relative.*--trust"):
        run(path)
    assert not (tmp_path.parent / "x").exists()


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


def locked(path, *options, **more):
    """The command's end where a filter refuses namespaces, as that of Docker's default settings."""
    command = ["-m", "tests.isolation.locked", "-m", "tight_fit", "script", path, "--gpu", "T4"]
    variables = {"PYTHONPATH": str(ROOT), **more.pop("variables", {})}
    return python(*command, "--quick", *options, env=os.environ | variables, **more)


def test_where_namespaces_are_refused_the_command_plans_on_a_copy(program, tmp_path):
    """Of the program's own folder, typed in another."""
    if landlock.version() < landlock.LEAST:
        pytest.skip("no Landlock that keeps signals in")
    write = "from pathlib import Path\nPath(__file__).with_name('x').write_text('x')\n"
    path = program(f"{write}open('here', 'w')\n{LOOP}")
    (tmp_path / "elsewhere").mkdir()
    before = digest(tmp_path)
    ended = locked(f"../{path}", cwd=tmp_path / "elsewhere")
    assert ended.returncode == 0, ended.stderr
    assert f"Note: {NOTE}, and could write nowhere else" in ended.stdout
    assert digest(tmp_path) == before


def test_where_landlock_is_refused_too_the_command_runs_nothing_without_trust(program, files):
    """With trust a program writes what it writes, but no weights."""
    saves = "torch.save(model, 'best.pt')\nassert torch.load('best.pt')\n"
    path = files / program(f"open('ran', 'w')\n{HEAD}{saves}while True:\n{STEP}")
    before, older = digest(files), {"NO_LANDLOCK": "1"}
    refused = locked(path, cwd=files, variables=older)
    assert refused.returncode == 2 and refused.stdout == "" and digest(files) == before
    assert refused.stderr.count("\n") == 1 and ": with --trust" in refused.stderr
    assert "(namespaces of its own: Operation not permitted; no Landlock" in refused.stderr
    trusted = locked(path, "--trust", cwd=files, variables=older)
    assert trusted.returncode == 0, trusted.stderr
    assert (files / "ran").exists() and (files / "best.pt").read_text() == "weights"
    assert "Note: The program was trusted, not isolated (namespaces" in trusted.stdout

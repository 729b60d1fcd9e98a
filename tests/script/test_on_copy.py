"""Programs that are planned where there are no namespaces: on a copy of their folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.night import few_by_day
from tests.script import HEAD, LOOP, STEP, run
from tests.script.test_harm import DEEDS, IMPORTS, MINI, WRITERS, state, with_files
from tight_fit import isolation
from tight_fit.isolation import landlock
from tight_fit.script.program import Refused

pytestmark = pytest.mark.skipif(
    landlock.version() < landlock.LEAST, reason="no Landlock that keeps signals in"
)
NOTE = "The program ran on a copy of its folder"
# Programs whose plan may not depend on how they are isolated.
ORDINARY = {
    "loaders": "from torch.utils.data import DataLoader, TensorDataset\n"
    f"{HEAD}rows = TensorDataset(torch.rand(64, 256))\n"
    "for (x,) in DataLoader(rows, batch_size=8, num_workers=2):\n"
    "    model(x.to(device)).square().mean().backward()\n"
    "    optimizer.step(); optimizer.zero_grad()\n",
    "saves": f"{HEAD}import sqlite3, subprocess, tempfile\n"
    "torch.save(model, 'best.pt'); torch.load('best.pt', weights_only=False)\n"
    "sqlite3.connect('runs.db').execute('create table runs (x)')\n"
    "subprocess.run('git init -q && git add .', shell=True, check=True)\n"
    "with tempfile.TemporaryDirectory() as folder: open(f'{folder}/x', 'w').write('x')\n"
    f"while True:\n{STEP}",
    "a trainer": """\
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=2)
rows = [{"input_ids": torch.ones(8, dtype=torch.long), "labels": 0} for _ in range(64)]
arguments = TrainingArguments("out", save_steps=1, report_to="none", save_strategy="steps")
Trainer(model, arguments, train_dataset=rows).train()
""",
}


@pytest.fixture
def on_copy(monkeypatch):
    def refused(*_):
        raise isolation.Unavailable("namespaces of its own")

    monkeypatch.setattr(isolation, "fork", refused)


@pytest.mark.parametrize("name", few_by_day([*DEEDS, *WRITERS], 4))
def test_a_program_sees_what_it_did_and_its_user_s_files_stay(name, program, tmp_path, on_copy):
    with_files(tmp_path)
    head = f"{IMPORTS}import torch\nMINI = {str(MINI)!r}\n"
    path = program(f"{head}{ {**DEEDS, **WRITERS}[name] }{LOOP}")
    before = state(tmp_path)
    facts = run(path)
    assert facts["fits"] and any(NOTE in note for note in facts["notes"])
    assert state(tmp_path) == before


@pytest.mark.parametrize("name", ORDINARY)
def test_a_plan_is_that_of_namespaces(name, program, tiny, monkeypatch):
    if isolation.why_not() is not None:
        pytest.skip(f"no namespaces here: {isolation.why_not()}")
    path = program(f"TINY = {str(tiny / 'bert')!r}\n{ORDINARY[name]}")
    expected = run(path)

    def refused(*_):
        raise isolation.Unavailable("namespaces of its own")

    monkeypatch.setattr(isolation, "fork", refused)
    found = run(path)
    found["notes"] = [note for note in found["notes"] if NOTE not in note]
    assert found == expected


def test_a_path_outside_its_folder_is_named_with_what_to_do(program, tmp_path, on_copy):
    path = program(f"open({str(tmp_path / 'x')!r}, 'w')\n{LOOP}")
    with pytest.raises(Refused, match=r"train.py:1: .*Permission denied.*relative.*--trust"):
        run(path)
    assert not (tmp_path / "x").exists()


def test_the_command_says_so_where_namespaces_are_refused(program, tmp_path):
    """By the system's own filter, and by the path of the script, which is its folder's."""
    text = f"from pathlib import Path\n(Path(__file__).resolve().parent / 'x').touch()\n{LOOP}"
    path = program(text)
    (tmp_path / "elsewhere").mkdir()
    before = state(tmp_path)
    command = ["-m", "tests.isolation.locked", "-m", "tight_fit", "script"]
    ended = subprocess.run(
        [sys.executable, *command, str(Path(path).resolve()), "--gpu", "T4", "--quick"],
        capture_output=True,
        text=True,
        cwd=tmp_path / "elsewhere",
        env={**os.environ, "PYTHONPATH": str(MINI.parents[2])},
    )
    assert ended.returncode == 0, ended.stderr
    assert f"Note: {NOTE}, and could write nowhere else" in ended.stdout
    assert state(tmp_path) == before

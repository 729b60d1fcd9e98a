"""A planned cell starts no other program: no `!command`, and no magic that may run one."""

import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from helpers.script import magic

TRAINING = """\
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number in range(10):
    model(torch.ones(64, 512, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "helpers")
    return shell


PROGRAMS = {
    "a command": "!rm -rf kept",
    "a command's output": "x = !rm -rf kept",
    "its lines": "!!rm -rf kept",
    "a shell": "%%bash\nrm -rf kept",
    "another": "%%sh\nrm -rf kept",
    "a script": "%%script bash\nrm -rf kept",
    "another Python": "%%python3\nimport shutil; shutil.rmtree('kept')",
    "a cell of commands": "%%!\nrm -rf kept",
    "sx": "%sx rm -rf kept",
    "system": "%system rm -rf kept",
    "sc": "%sc -l x = rm -rf kept",
    "an alias": "%rm -rf kept",
    "a file": "%run other.py",
    "pip": "%pip uninstall -y nothing",
    "a function": "get_ipython().system('rm -rf kept')",
    "a function for output": "get_ipython().getoutput('rm -rf kept')",
    "a function for magics": "get_ipython().run_cell_magic('bash', '', 'rm -rf kept')",
    "in a timed cell": "%time get_ipython().system('rm -rf kept')",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cell_starts_no_other_program(name, shell, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("x")
    (tmp_path / "other.py").write_text("import shutil; shutil.rmtree('kept')")
    before = shell.system, shell.run_cell_magic
    shell.run_cell_magic("plan", "--gpu T4", PROGRAMS[name])
    out = capfd.readouterr().out
    assert (tmp_path / "kept" / "x").read_text() == "x"
    assert (shell.system, shell.run_cell_magic) == before
    if name == "in a timed cell":
        return  # %time shows what is raised by itself, and the plan says that no step was taken
    assert re.match(
        r"%%plan: cell:1: the program starts (another program \(!|the magic %)\S", out
    ), out
    assert out.endswith(" in a cell of its own.\n") and out.count("\n") == 1


def test_harmless_magics_of_a_cell_are_planned(shell, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(magic, "display", lambda shown: None)
    shell.run_cell_magic("plan", "--gpu T4 --quick", f"%precision 3\n{TRAINING}")
    assert "YES, it fits" in capsys.readouterr().out
    shell.run_cell_magic("plan", "--gpu T4 --quick", f"%%time\n{TRAINING}")
    assert "YES, it fits" in capsys.readouterr().out

"""A planned cell starts no other program, and changes nothing that the kernel has open."""

import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tight_fit.command import magic

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
    shell.run_line_magic("load_ext", "tight_fit")
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


OPENED = """\
import mmap, os, socket, sqlite3, numpy, torch
log = open("train.log", "a")
print("before", file=log, flush=True)
numpy.arange(8, dtype="u1").tofile("rows.bin")
rows = numpy.memmap("rows.bin", "u1", "r+")
shared = torch.ones(4).share_memory_()
runs = sqlite3.connect("runs.db")
runs.execute("create table runs (x)")
runs.execute("insert into runs values (1)")
runs.commit()
folder = os.open(".", os.O_RDONLY)
here, there = socket.socketpair()
"""
WRITES = """\
print("in the cell", file=log, flush=True)
assert open("train.log").read().endswith("in the cell\\n")
assert rows.tolist() == list(range(8)) and shared.tolist() == [1] * 4
rows[:] = 0
rows.flush()
shared.zero_()
runs.execute("delete from runs")
runs.commit()
os.unlink("runs.db", dir_fd=folder)
try: here.send(b"x")
except OSError: pass
"""
CHECKS = """\
assert open("train.log").read() == "before\\n" and log.tell() == 7
assert rows.tolist() == list(range(8)), rows
assert open("rows.bin", "rb").read() == bytes(range(8))
assert shared.tolist() == [1] * 4
assert runs.execute("select x from runs").fetchall() == [(1,)]
assert sorted(os.listdir()) == ["rows.bin", "runs.db", "train.log"]
there.setblocking(False)
try: there.recv(1)
except BlockingIOError: pass
else: assert False
print("after", file=log, flush=True)
assert open("train.log").read() == "before\\nafter\\n"
"""


def test_a_cell_changes_nothing_that_the_kernel_has_open(shell, capsys, monkeypatch, tmp_path):
    """A log, a mapped file, a shared tensor, a database, a folder, a connection."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(magic, "display", lambda shown: None)
    assert shell.run_cell(OPENED).success
    shell.run_cell_magic("plan", "--gpu T4 --quick", WRITES + TRAINING)
    assert "YES, it fits" in capsys.readouterr().out
    shell.run_cell(CHECKS).raise_error()
    capsys.readouterr()
    shell.run_cell(WRITES).raise_error()  # what the cell does where it is not planned
    assert not shell.run_cell(CHECKS).success

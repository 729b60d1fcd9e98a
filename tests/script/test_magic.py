"""`%%plan` above a cell: names of earlier cells are seen, and the kernel stays as it was."""

import gc
import os
import re

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.figure import Figure

from tests.script.test_harm import no_namespaces
from tests.small import python
from tight_fit import isolation
from tight_fit.command import magic

EARLIER = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 512)).sum().backward()
optimizer.step()
count = 0
def loss_of(batch):
    return model(batch).square().mean()
"""
CELL = """\
model.cuda()
for number in range(10):
    loss = loss_of(torch.ones(64, 512, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    count += 1
"""
AFTER_A_PLAN = f"""\
from IPython.core.interactiveshell import InteractiveShell
from helpers.plan import plan
from helpers.recipe import Recipe
shell = InteractiveShell()
shell.run_line_magic("load_ext", "tight_fit")
plan(Recipe())
assert shell.run_cell({EARLIER!r}).success
shell.run_cell_magic("plan", "--gpu T4", {CELL!r})
"""


@pytest.fixture(scope="module")
def shell():
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "tight_fit")
    assert shell.run_cell(EARLIER).success
    return shell


@pytest.fixture
def shown(monkeypatch):
    shown = []
    monkeypatch.setattr(magic, "display", shown.append)
    return shown


def test_a_cell_is_planned_with_the_names_of_earlier_cells(shell, capsys, shown):
    names = set(shell.user_ns)
    weights = [parameter.clone() for parameter in shell.user_ns["model"].parameters()]
    shell.run_cell_magic("plan", '--gpu "RTX 3060"', f"%precision 3\n{CELL}")
    out = capsys.readouterr().out
    assert "YES, it fits on a RTX 3060" in out.replace("an RTX", "a RTX")
    assert "cell:4" in out and "525 k parameters, AdamW" in out and isinstance(shown[0], Figure)
    assert "step that holds the peak" in shown[0].alt and "parameters: from" in shown[0].alt
    assert set(shell.user_ns) == names and shell.user_ns["count"] == 0
    after = list(shell.user_ns["model"].parameters())
    assert all(torch.equal(a, b) and a.device.type == "cpu" for a, b in zip(after, weights))


@pytest.mark.parametrize(
    "cell, said",
    [
        ("x = (", "was never closed"),
        ("count += 1", "cell ended without a step of an optimizer"),
        (CELL.replace("loss_of", "lost_of"), "cell:3 in <module>: loss = lost_of"),
    ],
)
def test_what_cannot_be_planned_is_said_under_the_cell(shell, cell, said, capsys):
    shell.run_cell_magic("plan", "--gpu T4", cell)
    out = capsys.readouterr().out
    assert out.startswith("%%plan: ") and said in out and "Traceback" not in out


@pytest.mark.parametrize(
    "cell",
    [
        "!rm -rf kept",
        "x = !rm -rf kept",
        "%%bash\nrm -rf kept",
        "%sx rm -rf kept",
        "%run other.py",
        "%time get_ipython().system('rm -rf kept')",
    ],
)
def test_a_cell_starts_no_other_program(cell, shell, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "other.py").write_text("import shutil; shutil.rmtree('kept')")
    before = shell.system, shell.run_cell_magic
    shell.run_cell_magic("plan", "--gpu T4", cell)
    out = capfd.readouterr().out
    assert (tmp_path / "kept").exists() and (shell.system, shell.run_cell_magic) == before
    if not cell.startswith("%time"):  # which shows itself what is raised
        refusal = r"%%plan: cell:1: the program starts (another program \(!|the magic %)\S"
        assert re.match(refusal, out) and out.count("\n") == 1, out
        assert out.endswith(" in a cell of its own.\n")


def test_magics_that_start_programs_or_run_files_are_not_harmless():
    others = "! alias bash cython perl pip conda python3 run ruby sc script sh sx system uv".split()
    assert magic.HARMLESS.isdisjoint(others)


def test_where_nothing_isolates_a_cell_runs_only_if_trusted(shell, capsys, shown, monkeypatch):
    """And may write then what it writes, but changes no name of the kernel."""
    monkeypatch.setattr(isolation, "fork", no_namespaces)
    monkeypatch.setattr(isolation, "fork_on_copy", no_namespaces)
    shell.run_cell_magic("plan", "--gpu T4 --quick", CELL)
    out = capsys.readouterr().out
    assert "cannot be kept apart here" in out and "with --trust" in out and not shown
    shell.run_cell_magic("plan", "--gpu T4 --quick --trust", CELL)
    out = capsys.readouterr().out
    assert "YES, it fits" in out and "The program was trusted, not isolated" in out
    assert len(shown) == 1 and shell.user_ns["count"] == 0


def said_after_a_plan(variables):
    """What %%plan prints in a new process that has planned a recipe and then computed gradients."""
    done = python("-c", AFTER_A_PLAN, env=os.environ | variables | {"MPLBACKEND": "agg"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(),
    reason="only PyTorch's build for CUDA on a machine without a GPU pretends one during a plan",
)
def test_a_cell_is_planned_after_a_plan_of_a_recipe_without_a_gpu():
    assert "YES, it fits on a T4" in said_after_a_plan({})


LET_GO = """\
import gc
class Odd(nn.Parameter):
    "Of a kind that cannot be planned."
class Owner:
    def __del__(self):
        kept.clear()
odd, owner = nn.Linear(2, 2), Owner()
odd.weight = Odd(odd.weight.data)
odd.circle, owner.circle, kept = [odd], owner, [odd]
gc.collect()
del odd, owner
"""


@pytest.mark.usefixtures("shown")
def test_what_earlier_cells_let_go_of_is_not_planned(shell, capsys):
    """The model is garbage only when its owner has been collected, and then it is in a circle."""
    gc.disable()
    try:
        assert shell.run_cell(LET_GO).success
        shell.run_cell_magic("plan", "--gpu T4 --quick", f"%%time\n{CELL}")
    finally:
        gc.enable()
    assert "YES, it fits" in capsys.readouterr().out

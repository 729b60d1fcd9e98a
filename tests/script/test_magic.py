"""`%%plan` above a cell: names of earlier cells are seen, and the kernel stays as it was."""

import gc
import os

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.figure import Figure

from tests.small import python
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


def test_a_cell_is_planned_with_the_names_of_earlier_cells(shell, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(magic, "display", shown.append)
    names = set(shell.user_ns)
    weights = [parameter.clone() for parameter in shell.user_ns["model"].parameters()]
    shell.run_cell_magic("plan", '--gpu "RTX 3060"', CELL)
    out = capsys.readouterr().out
    assert "YES, it fits on a RTX 3060" in out.replace("an RTX", "a RTX")
    assert "cell:3" in out and "525 k parameters, AdamW" in out and isinstance(shown[0], Figure)
    assert "step that holds the peak" in shown[0].alt and "parameters: from" in shown[0].alt
    assert set(shell.user_ns) == names and shell.user_ns["count"] == 0
    after = list(shell.user_ns["model"].parameters())
    assert all(torch.equal(a, b) and a.device.type == "cpu" for a, b in zip(after, weights))


@pytest.mark.parametrize(
    "line, cell, said",
    [
        ("--gpu T4", "x = (", "was never closed"),
        ("--gpu T4", "count += 1", "cell ended without a step of an optimizer"),
        ("--gpu T4", CELL.replace("loss_of", "lost_of"), "cell:3 in <module>: loss = lost_of"),
    ],
)
def test_what_cannot_be_planned_is_said_under_the_cell(shell, line, cell, said, capsys):
    shell.run_cell_magic("plan", line, cell)
    out = capsys.readouterr().out
    assert out.startswith("%%plan: ") and said in out and "Traceback" not in out


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


def test_what_earlier_cells_let_go_of_is_not_planned(shell, capsys, monkeypatch):
    """The model is garbage only when its owner has been collected, and then it is in a circle."""
    monkeypatch.setattr(magic, "display", lambda shown: None)
    gc.disable()
    try:
        assert shell.run_cell(LET_GO).success
        shell.run_cell_magic("plan", "--gpu T4 --quick", CELL)
    finally:
        gc.enable()
    assert "YES, it fits" in capsys.readouterr().out

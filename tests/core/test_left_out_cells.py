"""A cell whose package is missing is left out in one sentence, and so is what depends on it."""

import ast
import sys
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from helpers import setup
from tight_fit import packages as here
from tight_fit.gpus import REHEARSAL

ABSENT = "no_such_module_of_anyone"
MADE = f"needs('{ABSENT}')\nimport {ABSENT}\ntable = old = {ABSENT}.table()"
LEFT_OUT = "This cell is left out: "


@pytest.fixture
def shell():
    shell = InteractiveShell()
    setup.leave_out_cells(shell)
    setup.leave_out_cells(shell)
    assert len(shell.ast_transformers) == 1
    shell.run_cell("from tight_fit.packages import needs\nold = 1")
    return shell


def said(shell, capsys, source):
    result = shell.run_cell(source)
    result.raise_error()
    return capsys.readouterr().out


def test_a_cell_without_its_package_is_one_sentence(shell, capsys):
    assert said(shell, capsys, MADE) == (
        f"{LEFT_OUT}it needs no-such-module-of-anyone, which this machine lacks "
        "(pip install no-such-module-of-anyone).\n"
    )
    assert said(shell, capsys, "needs('json')\nprint('runs')") == "runs\n"


@pytest.mark.parametrize(
    "source",
    [
        "table",
        "print(table)",
        "table['x'] = 1",
        "table += 1",
        "table = table + 1",
        "rows = [row for row in table]",
        "def show():\n    return table",
        "old",  # it exists, but this value is not the one that the cell would have made
        f"{ABSENT}.version",
    ],
)
def test_what_uses_a_name_of_that_cell_is_left_out_too(source, shell, capsys):
    said(shell, capsys, MADE)
    found = said(shell, capsys, source)
    assert found.startswith(LEFT_OUT) and found.count("\n") == 1
    assert found.endswith("of a cell that needs no-such-module-of-anyone.\n")


@pytest.mark.parametrize(
    "source",
    ["print('table')", "table = 2\nprint(table)", "for table in [1]:\n    print(table)",
     "print([table for table in [1]])", "def show(table):\n    return table\nprint(show(1))",
     "import json as table\nprint(table.__name__)"],
)  # fmt: skip
def test_what_makes_the_name_itself_runs(source, shell, capsys):
    said(shell, capsys, MADE)
    assert not said(shell, capsys, source).startswith(LEFT_OUT)


def test_a_name_that_was_made_again_can_be_used_again(shell, capsys):
    said(shell, capsys, MADE)
    said(shell, capsys, "table = 3")
    assert said(shell, capsys, "print(table)") == "3\n"
    assert said(shell, capsys, "print(old)").startswith(LEFT_OUT)


def test_what_a_left_out_cell_makes_is_missing_in_turn(shell, capsys):
    said(shell, capsys, MADE)
    assert said(shell, capsys, "figure = table.plot()").startswith(LEFT_OUT)
    assert "it uses `figure` of" in said(shell, capsys, "print(figure)")


def test_outside_a_notebook_it_is_an_error_of_one_sentence():
    with pytest.raises(ModuleNotFoundError, match="pip install no-such-module-of-anyone") as error:
        here.needs("json", ABSENT)
    assert error.value.name == ABSENT and "\n" not in str(error.value)
    here.needs("json", "ast")


def test_only_a_call_in_the_cell_itself_counts():
    inner = ast.parse(f"def later():\n    needs({ABSENT!r})\nx = needs")
    assert setup.asked(inner) == []
    assert setup.asked(ast.parse(f"# first\nneeds({ABSENT!r}, 'json')")) == [ABSENT, "json"]


@pytest.fixture
def headers(tmp_path):
    """A folder with Python's headers."""
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "Python.h").touch()
    return folder


def test_a_compiler_is_asked_for_like_a_package(headers, monkeypatch):
    monkeypatch.setattr(here.sysconfig, "get_path", lambda name: str(headers))
    monkeypatch.setattr(here.shutil, "which", lambda name: "/bin/x" if name == "clang++" else None)
    assert here.missing("g++") == here.missing("torch.compile") == []
    monkeypatch.setattr(here.shutil, "which", lambda name: None)
    assert here.missing("g++", "json", "g++") == ["g++"]
    with pytest.raises(ModuleNotFoundError, match=r"needs g\+\+, .* `apt-get install g\+\+`"):
        here.needs("g++")


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with nothing to compile with, whose torch sees a GPU."""
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv(REHEARSAL, raising=False)
    monkeypatch.setattr(here.shutil, "which", lambda name: None)
    monkeypatch.setattr(here.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(here.importlib.util, "find_spec", lambda name: None)


def test_on_a_gpu_torch_compile_needs_triton_and_what_triton_compiles_with(
    bare, headers, monkeypatch
):
    with pytest.raises(ModuleNotFoundError) as error:
        here.needs("torch.compile")
    assert "needs triton and gcc and python3-dev, which" in str(error.value)
    assert "`apt-get install gcc python3-dev && pip install triton`" in str(error.value)
    monkeypatch.setattr(here.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(here.importlib.util, "find_spec", lambda name: name)
    assert here.missing("torch.compile") == ["python3-dev"]
    monkeypatch.setattr(here.sysconfig, "get_path", lambda name: str(headers))
    assert here.missing("torch.compile") == []


def test_without_a_gpu_or_on_a_pretended_one_it_needs_a_compiler_of_cpp(bare, monkeypatch):
    assert here.missing("g++") == ["g++", "python3-dev"]
    monkeypatch.setenv(REHEARSAL, "T4:1")
    assert here.missing("torch.compile", "g++") == ["g++", "python3-dev"]
    monkeypatch.delenv(REHEARSAL)
    monkeypatch.delitem(sys.modules, "torch")
    assert here.missing("torch.compile") == ["g++", "python3-dev"]

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
def said(capsys):
    """A function that runs a cell, after one of a missing package, and gives what it printed."""
    shell = InteractiveShell()
    setup.leave_out_cells(shell)
    setup.leave_out_cells(shell)
    assert len(shell.ast_transformers) == 1

    def said(source):
        shell.run_cell(source).raise_error()
        return capsys.readouterr().out

    said("from tight_fit.packages import needs\nold = 1")
    assert said(MADE) == (
        f"{LEFT_OUT}it needs no-such-module-of-anyone, which this machine lacks "
        "(pip install no-such-module-of-anyone).\n"
    )
    return said


@pytest.mark.parametrize(
    "source",
    ["print(table)", "table['x'] = 1", "table += 1", "table = table + 1",
     "rows = [row for row in table]", "def show():\n    return table", f"{ABSENT}.version",
     "old"],  # it exists, but this value is not the one that the cell would have made
)  # fmt: skip
def test_what_uses_a_name_of_that_cell_is_left_out_too(source, said):
    found = said(source)
    assert found.startswith(LEFT_OUT) and found.count("\n") == 1
    assert found.endswith("of a cell that needs no-such-module-of-anyone.\n")


def test_what_makes_the_name_itself_runs(said):
    for source in (
        "needs('json')", "print('table')", "for table in [1]:\n    pass",
        "[table for table in [1]]", "def show(table):\n    return table\nshow(1)",
        "import json as table",
    ):  # fmt: skip
        assert said(MADE).startswith(LEFT_OUT)  # the case before may have made the name
        assert not said(f"{source}\nprint('runs')").startswith(LEFT_OUT), source


def test_names_come_back_when_they_are_made_and_go_on_missing_in_turn(said):
    assert said("figure = table.plot()").startswith(LEFT_OUT)
    assert "it uses `figure` of" in said("print(figure)")
    assert said("table = 3\nprint(table)") == said("print(table)") == "3\n"
    assert said("print(old)").startswith(LEFT_OUT)


def test_outside_a_notebook_it_is_an_error_of_one_sentence():
    with pytest.raises(ModuleNotFoundError, match="pip install no-such-module-of-anyone") as error:
        here.needs("json", ABSENT)
    assert error.value.name == ABSENT and "\n" not in str(error.value)
    here.needs("json", "ast")


def test_only_a_call_in_the_cell_itself_counts():
    inner = ast.parse(f"def later():\n    needs({ABSENT!r})\nx = needs")
    assert setup.asked(inner) == []
    assert setup.asked(ast.parse(f"# first\nneeds({ABSENT!r}, 'json')")) == [ABSENT, "json"]


@pytest.mark.parametrize(
    "gpu, there, asked, missing",
    [
        (False, ["clang++", "headers", "json"], ["g++", "torch.compile"], []),
        (False, ["headers", "json"], ["g++", "json", "g++"], ["g++"]),
        (None, [], ["torch.compile"], ["g++", "python3-dev"]),  # torch is not imported yet
        ("pretended", [], ["torch.compile", "g++"], ["g++", "python3-dev"]),
        (True, [], ["torch.compile"], ["triton", "gcc", "python3-dev"]),
        (True, ["gcc", "triton"], ["torch.compile"], ["python3-dev"]),
        (True, ["gcc", "triton", "headers"], ["torch.compile"], []),
    ],
)
def test_a_compiler_is_asked_for_like_a_package_and_on_a_gpu_triton_with_its_own(
    gpu, there, asked, missing, monkeypatch, tmp_path
):
    folder = tmp_path / "include"
    folder.mkdir()
    if "headers" in there:
        (folder / "Python.h").touch()
    monkeypatch.delenv(REHEARSAL, raising=False)
    if gpu == "pretended":
        monkeypatch.setenv(REHEARSAL, "T4:1")
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: bool(gpu)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    if gpu is None:
        monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(here.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(here.sysconfig, "get_path", lambda name: str(folder))
    monkeypatch.setattr(here.importlib.util, "find_spec", lambda name: name in there or None)
    assert here.missing(*asked) == missing
    if gpu is True and not there:
        told = "needs triton and gcc and python3-dev, which.*`apt-get install gcc python3-dev && "
        with pytest.raises(ModuleNotFoundError, match=f"{told}pip install triton`"):
            here.needs(*asked)

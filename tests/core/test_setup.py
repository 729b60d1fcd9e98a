"""The first cell, the badges, and the commands that make calls."""

import importlib.metadata
import os
import subprocess
import warnings

import nbformat
import pytest
import torch

from helpers import profile
from helpers import setup as notebook_setup
from tests.small import ROOT, notebook, python
from tight_fit import gpus
from tools.course import badges, opening, stress

ADDRESS = "https://github.com/some/course"
COMMIT = "0123456789" * 4


def test_an_address_is_put_in_everywhere_and_taken_out_again(folder, tmp_path, monkeypatch):
    path = notebook(folder, "import torch")
    page, cited = tmp_path / "README.md", tmp_path / "CITATION.cff"
    marks = "<!-- badges -->\nold\n<!-- /badges -->\n<!-- clone -->\n<!-- /clone -->"
    page.write_text(f"# T\n{marks}\nend\n")
    cited.write_text("version: 1\nlicense: MIT\n")
    monkeypatch.setattr(opening, "release", lambda: COMMIT)

    def told(address):
        """What `make badges` writes with this address in pyproject.toml."""
        found = badges.stale(folder, page, cited, address)
        for file, text in found.items():
            file.write_text(text)
        assert badges.stale(folder, page, cited, address) == {}
        return set(found), [cell.source for cell in nbformat.read(path, 4).cells]

    _, bare = told("")
    found, cells = told(ADDRESS)
    assert found == {path, page, cited}
    assert cells[0].count("some/course/blob/main/notebooks/00_small.ipynb") == 2
    assert cells[0].startswith("# Small\n\n[![") and "\n\nSee [the next]" in cells[0]
    assert cells[1:] == [opening.first_cell(ADDRESS), "import torch"]
    assert f" {ADDRESS} {COMMIT}" in cells[1] and "fetch" in cells[1]
    assert f"git clone {ADDRESS}\n" in page.read_text()
    assert cited.read_text() == f"version: 1\nrepository-code: {ADDRESS}\nlicense: MIT\n"
    assert set(badges.stale(folder, page, cited, f"{ADDRESS}-2")) == {path, page, cited}

    assert told("") == ({path, page, cited}, bare)
    assert bare[1:] == [opening.first_cell(""), "import torch"]
    for text in (*bare, page.read_text(), cited.read_text()):
        assert "some/course" not in text and "git" not in text
    monkeypatch.setattr(opening, "release", lambda: "")
    assert told(ADDRESS)[1][1] == opening.first_cell("")  # without a release none is fetched


def start(folder, address="", commit="", **environment):
    """What the first cell says in a kernel in `folder`, up to the check of the machine."""
    program = opening.first_cell(address, commit).partition("from helpers")[0]
    env = os.environ | environment
    done = python("-c", f"{program}\nprint(sys.path[0])", cwd=folder, env=env)
    # git's other end is a process of its own, and may say last that it lacks a commit
    said = [line for line in done.stderr.splitlines() if not line.startswith("fatal: git ")]
    return done.stdout.strip(), (said or [""])[-1]


def copied(folder, *without):
    for name in {"helpers/recipe.py", "tight_fit/units.py"} - {*without}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_the_first_cell_finds_the_files_or_says_how_to_bring_them(tmp_path):
    apart, beside = tmp_path / "a" / "working", tmp_path / "b"
    for folder in (apart, beside):
        folder.mkdir(parents=True)
    copied(beside / "half", "tight_fit/units.py")  # an unpacking that was broken off
    assert start(beside)[1].startswith("FileNotFoundError: Unpack the course's zip beside")
    whole = copied(beside / "whole")
    attached = copied(tmp_path / "a" / "input" / "datasets" / "me" / "course")
    assert start(beside) == (str(whole), "") and start(whole / "helpers") == (str(whole), "")
    assert start(apart) == (str(attached), "")


def test_with_an_address_the_first_cell_fetches_the_release(tmp_path, monkeypatch):
    origin, commits = copied(tmp_path / "origin"), []
    as_me = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for name in ("released", "later"):
        (origin / name).write_text("")
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", name]):
            subprocess.run([*as_me, *words], cwd=origin, check=True)
        said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=origin, capture_output=True)
        commits.append(said.stdout.decode().strip())
    address, released = f"file://{origin}", commits[0]
    reader, other = tmp_path / "reader", tmp_path / "other"
    reader.mkdir()
    said = "FileNotFoundError: Unpack the course's zip"
    assert start(reader, f"file://{tmp_path}/none", released)[1].startswith(said)
    assert start(reader, address, released, PATH="")[1].startswith(said)  # there is no git
    assert start(reader, address, "0" * 40)[1].startswith(said)  # it has no such commit
    copied(reader / ".origin")  # what an interrupted fetch left is not taken
    assert start(reader, address, released) == (str(reader / "origin"), "")
    assert (reader / "origin" / "released").exists()
    assert not (reader / "origin" / "later").exists() and not (reader / ".origin").exists()
    copied(other / "origin", "tight_fit/units.py")  # a folder of that name is left alone
    assert start(other, address, released)[1].startswith("FileNotFoundError")
    assert (other / "origin" / "helpers" / "recipe.py").exists()
    monkeypatch.setattr(opening, "_setting", lambda name: "v0.2.0")
    with pytest.raises(ValueError, match="is no commit: write all 40 digits"):
        opening.release()


# The first cell's check of the machine


def test_notebook_says_what_runs_in_two_lines_and_warns_of_nothing_that_is_to_come(capsys):
    notebook_setup.setup()
    said = capsys.readouterr().out.splitlines()
    assert 2 <= len(said) <= 3 and said[0].startswith("Python 3.") and ", torch 2." in said[0]
    assert said[1].startswith("Profile mini: the small bundled models (chosen by TIGHT_FIT_PROF")
    with warnings.catch_warnings(record=True) as caught:
        for module in ("transformers.modeling_utils", "peft.tuners", "__main__", "torchless"):
            warnings.warn_explicit(module, FutureWarning, "a file", 1, module)
    assert [str(one.message) for one in caught] == ["__main__", "torchless"]


SETUP = """
import os, sys
from helpers import setup as notebook_setup
assert "torch" not in sys.modules
notebook_setup.setup()
import torch
visible = os.environ["CUDA_VISIBLE_DEVICES"]
print(torch.cuda.is_available(), torch.cuda.device_count(), repr(visible))
"""


def test_a_gpu_that_cannot_be_used_is_named_and_hidden():
    """The simulation, that of the soak, shows the GPU if torch is asked before it is hidden."""
    environment = stress.environment("no-kernels") | {gpus.VISIBLE: "0,1"}
    environment["PYTHONPATH"] += os.pathsep + str(ROOT)
    done = python("-c", SETUP, check=True, env=os.environ | environment, cwd=None)
    lines = done.stdout.splitlines()
    assert lines[0].endswith("on the CPU.")
    assert "(there is a GPU, but it cannot run this PyTorch (CUDA error: no kernel im" in lines[1]
    assert lines[-1] == "False 0 ''"


def test_notebook_says_why_a_gpu_cannot_be_used_whatever_the_profile(capsys, monkeypatch):
    monkeypatch.setattr(gpus, "_probed", (False, "there is a GPU, but it is broken"))
    monkeypatch.setenv(gpus.VISIBLE, "0,1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    notebook_setup.setup()
    assert "Mind: there is a GPU, but it is broken." in capsys.readouterr().out
    assert os.environ[gpus.VISIBLE] == "" and not gpus.some_hidden()  # for ranks as well


class Started(Exception):
    """Somebody started a process."""


def refuse(*_, **__):
    raise Started


@pytest.fixture
def no_sign(monkeypatch, tmp_path):
    """A machine on which nothing points to a GPU."""
    monkeypatch.setattr(gpus, "_probed", None)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)


@pytest.mark.parametrize("sign", ["driver", "variable", "nvidia-smi", "torch"])
def test_every_sign_of_a_gpu_starts_the_probe_and_nothing_else_does(
    sign, no_sign, monkeypatch, tmp_path
):
    monkeypatch.setattr(gpus.subprocess, "run", refuse)
    for visible in (None, "", "-1"):
        if visible is not None:
            monkeypatch.setenv(gpus.VISIBLE, visible)
        assert gpus.probe() == (False, gpus.NO_GPU)
        monkeypatch.setattr(gpus, "_probed", None)
    monkeypatch.delenv(gpus.VISIBLE)
    (tmp_path / "0000:04").mkdir()
    {
        "driver": lambda: monkeypatch.setattr(gpus, "DRIVER", tmp_path),
        "variable": lambda: monkeypatch.setenv(gpus.VISIBLE, "1"),
        "nvidia-smi": lambda: monkeypatch.setattr(gpus.shutil, "which", str),
        "torch": lambda: monkeypatch.setattr(torch.cuda, "is_available", lambda: True),
    }[sign]()
    with pytest.raises(Started):
        gpus.probe()


@pytest.mark.parametrize(
    "program, usable, words",
    [("print('a warning')\nprint('usable')", True, ""),
     (f"print({gpus.NO_GPU!r})", False, gpus.NO_GPU),
     ("print('CUDA error: out of memory')", False, "PyTorch (CUDA error: out of memory); on Kag"),
     ("raise SystemExit(3)", False, "(the test of it ended with exit status 3)"),
     ("import time\ntime.sleep(60)", False, "(no kernel finished within 2 seconds)")],
)  # fmt: skip
def test_the_probe_s_answer_is_one_sentence_asked_once(
    program, usable, words, no_sign, monkeypatch
):
    monkeypatch.setenv(gpus.VISIBLE, "0")
    monkeypatch.setattr(gpus, "PROBE", program)
    monkeypatch.setattr(gpus, "PROBE_SECONDS", 2.0)
    answer = gpus.probe()
    assert answer[0] == usable and words in answer[1] and "\n" not in answer[1]
    monkeypatch.setattr(gpus.subprocess, "run", refuse)
    gpus.hide_all()
    assert gpus.probe() == answer == profile.usable_cuda()


def test_old_or_missing_libraries_are_one_sentence(monkeypatch):
    assert notebook_setup.problems() == {}
    assert notebook_setup.installed("no-such-package-of-anyone") is None
    real = importlib.metadata.version
    old = {"transformers": "4.50.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: old.get(name) or real(name))
    assert set(notebook_setup.problems()) == {"transformers"}
    found = {"torch": "torch>=2.11 is needed but 1.0 is installed"}
    monkeypatch.setattr(notebook_setup, "problems", lambda: found)
    with pytest.raises(RuntimeError, match=f"{found['torch']}: run `pip install"):
        notebook_setup.complain()
    monkeypatch.setattr(notebook_setup, "problems", lambda: {"peft": "peft>=0.17 is not installed"})
    assert notebook_setup.complain() == ["peft>=0.17 is not installed"]


@pytest.mark.parametrize(
    "given, count, then",
    [("0,1", 2, "0"), ("3,1", 2, "3"), ("1", 1, "1"), ("", 0, ""), (None, 2, "0")],
)
def test_one_gpu_hides_the_others(given, count, then, monkeypatch, tmp_path):
    for name in ("0000:04", "0000:05"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(gpus.BEFORE, "")
    monkeypatch.delenv(gpus.BEFORE)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.setenv(gpus.VISIBLE, given or "")
    if given is None:
        monkeypatch.delenv(gpus.VISIBLE)
    assert gpus.hide_all_but_first() == count and os.environ[gpus.VISIBLE] == then

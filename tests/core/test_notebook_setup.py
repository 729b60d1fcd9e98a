"""The first cell, the badges, and the commands that make calls."""

import os
import subprocess
import sys

import nbformat
import pytest
import torch

from helpers import gpus, notebook_setup
from tests.small import notebook
from tools.course import ROOT, __main__, badges
from tools.course.execute import execute

# Badges and the first cell


def test_badges_are_put_in_once_and_found_stale(folder, tmp_path):
    path = notebook(folder, "import torch")
    page = tmp_path / "README.md"
    page.write_text(
        "# T\n<!-- badges -->\nold\n<!-- /badges -->\n<!-- clone -->\n<!-- /clone -->\nend\n"
    )
    found = badges.stale(folder, page)
    assert set(found) == {path, page}
    for file, text in found.items():
        file.write_text(text)
    assert badges.stale(folder, page) == {}
    cells = nbformat.read(path, 4).cells
    address = notebook_setup.repository().removeprefix("https://github.com/")
    assert cells[0].source.count(f"{address}/blob/main/notebooks/00_small.ipynb") == 2
    assert cells[0].source.startswith("# Small\n\n[![") and "\n\nSee [the next]" in cells[0].source
    assert [cell.source for cell in cells[1:]] == [notebook_setup.first_cell(), "import torch"]
    assert (
        f"git clone {notebook_setup.repository()}\n" in page.read_text()
        and page.read_text().endswith("end\n")
    )
    path.write_text(path.read_text().replace(address, "some/fork"))
    assert set(badges.stale(folder, page)) == {path}


# The commands, as make calls them


def test_a_wrong_command_line_ends_in_one_sentence(capsys):
    assert __main__.main(["run", "99"]) == 1
    assert "There is no notebook" in capsys.readouterr().err


def make(*words):
    return subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)


def test_make_help_names_every_target():
    text = (ROOT / "Makefile").read_text(encoding="utf8")
    targets = next(line for line in text.splitlines() if line.startswith(".PHONY:")).split()[1:]
    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True).stdout
    assert [name for name in targets if name != "help" and f"make {name} " not in said] == []


def test_make_passes_notebooks_on():
    assert "-m tools.course record 00 02" in make("record", "N=00 02", "PY=python3").stdout
    assert "venv" not in make("run", "PY=python3").stdout


# The first cell's check of the machine


def test_notebook_says_what_runs_in_two_lines(capsys):
    notebook_setup.setup()
    said = capsys.readouterr().out.splitlines()
    assert 2 <= len(said) <= 3 and said[0].startswith("Python 3.") and ", torch 2." in said[0]
    assert said[1].startswith("Profile mini: TIGHT_FIT_PROFILE asks for it.")


def test_notebook_says_why_a_gpu_cannot_be_used(capsys, monkeypatch):
    monkeypatch.setattr(
        "helpers.profile.usable_cuda",
        lambda: (False, "there is a GPU, but it cannot run this PyTorch"),
    )
    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, lambda: 1)
    monkeypatch.setenv(gpus.VISIBLE, "0,1")
    notebook_setup.setup()
    assert "Mind: there is a GPU, but it cannot run this PyTorch." in capsys.readouterr().out
    assert (
        not torch.cuda.is_available() and torch.cuda.device_count() == 0
    )  # so that no later cell uses it
    assert os.environ[gpus.VISIBLE] == "" and not gpus.some_hidden()  # nor a rank


def test_old_or_missing_libraries_are_one_sentence(monkeypatch):
    monkeypatch.setattr(
        notebook_setup, "problems", lambda: {"torch": "torch>=2.11 is needed but 1.0 is installed"}
    )
    with pytest.raises(
        RuntimeError, match="torch>=2.11 is needed but 1.0 is installed: run `pip install"
    ):
        notebook_setup.complain()
    monkeypatch.setattr(notebook_setup, "problems", lambda: {"peft": "peft>=0.17 is not installed"})
    assert notebook_setup.complain() == ["peft>=0.17 is not installed"]


def test_problems_compares_versions(monkeypatch):
    assert notebook_setup.problems() == {}
    real = notebook_setup.importlib.metadata.version
    monkeypatch.setattr(
        notebook_setup.importlib.metadata,
        "version",
        lambda name: "4.50.0" if name == "transformers" else real(name),
    )
    assert set(notebook_setup.problems()) == {"transformers"}


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


def test_the_first_cell_finds_the_course_and_runs_before_torch(tmp_path):
    program = (
        "import sys\n"
        + notebook_setup.first_cell().replace(
            "notebook_setup.setup()", "print('torch' in sys.modules)"
        )
        + "\nprint(home.resolve())"
    )
    for place in (ROOT / "notebooks", ROOT):
        said = subprocess.run(
            [sys.executable, "-c", program], cwd=place, capture_output=True, text=True, check=True
        ).stdout
        assert said.split("\n")[:2] == ["False", str(ROOT)]
    attached = tmp_path / "input" / "owner" / "course"
    attached.mkdir(parents=True)
    (attached / "helpers").symlink_to(ROOT / "helpers")
    (tmp_path / "working").mkdir()
    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "working",
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split("\n")[1] == str(attached)


def test_say_prints_where_there_is_no_page(capsys):
    notebook_setup.say("it takes **9** GiB")
    assert capsys.readouterr().out == "it takes **9** GiB\n"


def test_say_shows_markdown_with_a_text_form(folder):
    done, _ = execute(
        notebook(
            folder,
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom helpers import notebook_setup\nnotebook_setup.say('**9** GiB')",
        ),
        {},
    )
    assert done.cells[1].outputs[0].data == {
        "text/markdown": "**9** GiB",
        "text/plain": "**9** GiB",
    }

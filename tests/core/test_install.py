"""The first cell's installer: a dead network costs seconds, wheels beside the course come first."""

import importlib.metadata
import sys
import zipfile

import pytest

from helpers import setup
from tests.small import python


@pytest.fixture
def lacking(monkeypatch):
    """One package is missing until pip has run; gives the calls of pip."""
    calls = []
    monkeypatch.setattr(setup, "problems", lambda: {} if calls else {"peft": "is missing"})
    monkeypatch.setattr(setup, "_pip", lambda *arguments: calls.append(arguments))
    return calls


def test_a_network_that_answers_nothing_costs_the_limit_and_no_more(monkeypatch):
    silent = [sys.executable, "-c", "import time; time.sleep(600)", "--"]
    monkeypatch.setattr(setup, "PIP", silent)
    assert not setup.network(0.5)


@pytest.mark.parametrize("code, there", [(0, True), (1, False)])
def test_pip_says_whether_there_is_a_network(code, there, monkeypatch):
    monkeypatch.setattr(setup, "PIP", [sys.executable, "-c", f"raise SystemExit({code})", "--"])
    assert setup.network() == there


def test_without_a_network_one_sentence_names_what_is_missing(lacking, monkeypatch, capsys):
    monkeypatch.setattr(setup, "network", lambda: False)
    assert setup.install() is False and lacking == []
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "peft" in said and "attach a bundle" in said


def test_with_a_network_only_what_is_missing_is_asked_for(lacking, monkeypatch, capsys):
    monkeypatch.setattr(setup, "network", lambda: True)
    assert setup.install() is True
    (asked,) = lacking
    assert asked[0] == "install" and [word.partition(">")[0] for word in asked[1:]] == ["peft"]
    assert "Installing peft" in capsys.readouterr().out


def test_where_nothing_is_missing_nothing_is_asked(monkeypatch, capsys):
    monkeypatch.setattr(setup, "network", None)
    monkeypatch.setattr(setup, "problems", dict)
    assert setup.install() is True and capsys.readouterr().out == ""


def test_wheels_beside_the_course_are_installed_without_a_network(tmp_path, monkeypatch, capsys):
    """With the real pip, from a wheel made here, into a folder of its own."""
    wheel = tmp_path / "wheels" / "tightfit_trial-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "tightfit_trial-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tightfit_trial.py", "VALUE = 7\n")
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tightfit-trial\nVersion: 1.0\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    target = tmp_path / "site"
    real = setup._pip
    monkeypatch.setattr(setup, "_pip", lambda *words: real(*words, "--target", str(target), "-q"))
    monkeypatch.setattr(setup, "WHEELS", wheel.parent)
    monkeypatch.setattr(
        setup, "problems", lambda: {} if target.exists() else {"tightfit-trial": "missing"}
    )
    monkeypatch.setattr(setup, "_wanted", lambda names: list(names))
    monkeypatch.setattr(setup, "network", None)
    assert setup.install() is True
    assert (target / "tightfit_trial.py").read_text() == "VALUE = 7\n"


def test_the_installer_imports_neither_torch_nor_anything_outside_python():
    program = (
        "import sys; import helpers.setup; "
        "print([name for name in ('torch', 'numpy', 'packaging', 'pip') if name in sys.modules])"
    )
    done = python("-c", program)
    assert done.stdout == "[]\n", done.stderr


def test_a_package_s_version_is_that_of_its_metadata():
    assert setup.installed("torch") == importlib.metadata.version("torch")
    assert setup.installed("no-such-package-of-anyone") is None

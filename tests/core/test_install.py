"""The first cell's installer: a dead network costs seconds, wheels beside the course come first."""

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


@pytest.mark.parametrize(
    "program, there",
    [("", True), ("raise SystemExit(1)", False), ("import time; time.sleep(600)", False)],
)
def test_pip_says_whether_there_is_a_network_and_silence_costs_the_limit(
    program, there, monkeypatch
):
    monkeypatch.setattr(setup, "PIP", [sys.executable, "-c", program, "--"])
    assert setup.network(0.5 if "sleep" in program else 60) == there


def test_only_what_is_missing_is_asked_for_or_named(lacking, monkeypatch, capsys):
    monkeypatch.setattr(setup, "network", lambda: False)
    assert setup.install() is False and lacking == []
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "peft" in said and "attach a bundle" in said
    monkeypatch.setattr(setup, "network", lambda: True)
    assert setup.install() is True
    ((first, *words),) = lacking
    assert first == "install" and [word.partition(">")[0] for word in words] == ["peft"]
    assert "Installing peft" in capsys.readouterr().out
    monkeypatch.setattr(setup, "network", None)  # nothing is missing now, so nobody asks
    assert setup.install() is True and capsys.readouterr().out == ""


def test_wheels_beside_the_course_are_installed_without_a_network(tmp_path, monkeypatch):
    """With the real pip, from a wheel made here, into a folder of its own."""
    wheel, target = tmp_path / "wheels" / "tightfit_trial-1.0-py3-none-any.whl", tmp_path / "site"
    wheel.parent.mkdir()
    info = "tightfit_trial-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tightfit_trial.py", "VALUE = 7\n")
        said = "Metadata-Version: 2.1\nName: tightfit-trial\nVersion: 1.0\n"
        file.writestr(f"{info}/METADATA", said)
        said = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", said)
        file.writestr(f"{info}/RECORD", "")
    real, missing = setup._pip, {"tightfit-trial": "missing"}
    monkeypatch.setattr(setup, "_pip", lambda *words: real(*words, "--target", str(target), "-q"))
    monkeypatch.setattr(setup, "WHEELS", wheel.parent)
    monkeypatch.setattr(setup, "problems", lambda: {} if target.exists() else missing)
    monkeypatch.setattr(setup, "_wanted", lambda names: list(names))
    monkeypatch.setattr(setup, "network", None)
    assert setup.install() is True
    assert (target / "tightfit_trial.py").read_text() == "VALUE = 7\n"


def test_the_installer_imports_neither_torch_nor_anything_outside_python():
    heavy = "{'torch', 'numpy', 'packaging', 'pip'}"
    done = python("-c", f"import sys; import helpers.setup; print({heavy} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr

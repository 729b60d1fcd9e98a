"""`pip install .` makes a package that works outside the repository; versions have one place."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import tight_fit
from tests.small import ROOT, python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
SOURCES = ("tight_fit", "helpers", "by_hand", "exercises", "benchmarks", "tools")
NAMES = ("pyproject.toml", "requirements.txt", "requirements-dev.txt", "README.md", "LICENSE")

# Run with only the installed package on the path, in an empty folder.
OUTSIDE = """
import importlib.metadata, importlib.util, json
import tight_fit
planned = tight_fit.plan_model("bert-base-uncased", batch_size=2, length=16)
print(json.dumps({
    "file": tight_fit.__file__,
    "version": importlib.metadata.version("tight-fit"),
    "course": list(filter(importlib.util.find_spec, ("helpers", "exercises", "by_hand"))),
    "peak": planned.peak,
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the sources, so that no build folder is left in the repository."""
    pytest.importorskip("setuptools")
    copy, target = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in NAMES:
        shutil.copy(ROOT / name, copy)
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(target), "."], cwd=copy, check=True)
    return next(target.glob("*.whl"))


def test_the_wheel_holds_the_planner_alone_with_its_data(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tight_fit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == wanted
    assert "tight_fit/command/known/answers.json.xz" in inside


def test_the_installed_package_plans_without_the_course(wheel, tmp_path):
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [*PIP, "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(wheel)], check=True)
    run = python("-P", "-c", OUTSIDE, cwd=empty, env={**os.environ, "PYTHONPATH": str(target)})
    assert not run.returncode, run.stderr
    shown = json.loads(run.stdout)
    assert Path(shown["file"]).is_relative_to(target)
    assert shown["version"] == tight_fit.__version__
    assert shown["course"] == [] and shown["peak"] > 16 * 100_000_000  # four fp32 values each


def test_there_is_one_version():
    assert "version" in PROJECT["project"]["dynamic"]
    dynamic = PROJECT["tool"]["setuptools"]["dynamic"]
    assert dynamic["version"] == {"attr": "tight_fit.__version__"}
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf8")
    newest = re.search(r"^## \[([\d.]+)\]", changes, re.MULTILINE)[1]
    assert tight_fit.__version__.removesuffix(".dev0") == newest
    assert f"version: {newest}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf8")

"""The bundle for a machine without internet: what is in it, and that a notebook starts from it."""

import zipfile

import pytest

from helpers import setup
from tests.small import python
from tight_fit.models import hub
from tight_fit.models.local import MIRROR, LocalCopy, in_mirror
from tools.course import ROOT, bundle, opening


def test_without_a_network_a_notebook_finds_the_course_and_the_rest_is_named(
    tmp_path, monkeypatch, capsys
):
    def refuse(kind, name):
        raise hub.HubUnavailable("no hub")

    monkeypatch.setattr(bundle, "network", lambda seconds: False)
    monkeypatch.setattr(hub, "find", refuse)
    bundle.bundle(tmp_path / "bundle.zip")
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Left out: all wheels, as no network answers; model microsoft/deb")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.zip"]
    with zipfile.ZipFile(tmp_path / "bundle.zip") as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "input" / "attached")
    wanted = ("helpers/r8/r8.jsonl.xz", "notebooks/00_start_here.ipynb", "requirements.txt")
    wanted += ("notebooks/drawings/02_micro_batches.svg",)
    assert {f"{bundle.TOP}/{name}" for name in wanted} <= names
    assert not any("/.venv/" in name or "__pycache__" in name for name in names)
    (tmp_path / "working").mkdir()
    program = opening.first_cell().replace("; setup()", "\nimport helpers; print(helpers.__file__)")
    done = python("-c", program, cwd=tmp_path / "working", check=True)
    course = str(tmp_path / "input" / "attached" / bundle.TOP)
    assert course in done.stdout.replace("working/../", "")


def test_wheels_models_and_data_lie_where_the_first_cell_looks(tmp_path, monkeypatch, capsys):
    repo = tmp_path / "repo"
    repo.mkdir()
    for name in ("config.json", "model.safetensors", "preprocessor_config.json", "notes.md"):
        (repo / name).write_text("{}")
    vit = hub.REPOS["model", "google/vit-base-patch16-224-in21k"]
    monkeypatch.setattr(hub, "REPOS", {("model", vit.id): vit})
    monkeypatch.setattr(hub, "find", lambda *_: LocalCopy(vit, repo, "cache", None))
    monkeypatch.setattr(bundle, "network", lambda seconds: True)

    def download(folder, names):
        assert {"transformers", "bitsandbytes", "peft", bundle.TEXT} <= set(names)
        assert not {"torch", "numpy", "pandas", "triton", "ipykernel"} & set(names)  # the host's
        (folder / "peft-1-py3-none-any.whl").write_bytes(b"")
        return []

    monkeypatch.setattr(bundle, "download", download)
    bundle.bundle(tmp_path / "bundle.zip")
    assert "Left out" not in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "bundle.zip") as packed:
        packed.extractall(tmp_path / "input")
    home = tmp_path / "input" / bundle.TOP
    assert (home / setup.WHEELS.relative_to(ROOT) / "peft-1-py3-none-any.whl").exists()
    monkeypatch.setenv(MIRROR, str(home / "mirror"))
    copy = in_mirror(vit)
    assert copy is not None and not (copy.path / "notes.md").exists()


def test_a_package_without_a_wheel_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(bundle, "PYTHONS", ("3.12",))
    missing = bundle.download(tmp_path, ["no-such-package-of-anyone"])
    assert missing == ["no-such-package-of-anyone for Python 3.12"]


def test_a_bundle_that_cannot_be_written_leaves_the_old_one(tmp_path):
    (tmp_path / "bundle.zip").write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        bundle.write(tmp_path / "bundle.zip", {"a": tmp_path / "none"})
    assert (tmp_path / "bundle.zip").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.zip"]

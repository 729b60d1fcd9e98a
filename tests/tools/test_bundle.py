"""The bundle for a machine without internet: what is in it, and that a notebook starts from it."""

import zipfile

import pytest

from helpers import setup
from tests.small import python
from tight_fit.models import hub
from tight_fit.models.local import MIRROR, LocalCopy, in_mirror
from tools.course import ROOT, bundle, opening


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(bundle, "network", lambda seconds: False)

    def refuse(kind, name):
        raise hub.HubUnavailable("no hub")

    monkeypatch.setattr(hub, "find", refuse)


def test_without_a_network_the_course_is_packed_and_the_rest_named(offline, tmp_path, capsys):
    bundle.bundle(tmp_path / "bundle.zip")
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("Left out: all wheels, as no network answers; model microsoft/deb")
    names = set(zipfile.ZipFile(tmp_path / "bundle.zip").namelist())
    wanted = ("helpers/recipe.py", "helpers/r8/r8.jsonl.xz", "notebooks/00_start_here.ipynb")
    wanted += ("notebooks/drawings/02_micro_batches.svg",)
    assert {f"{bundle.TOP}/{name}" for name in (*wanted, "requirements.txt")} <= names
    assert not any("/.venv/" in name or "__pycache__" in name for name in names)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.zip"]


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
        assert "peft" in names and "torch" not in names and bundle.TEXT in names
        (folder / "peft-1-py3-none-any.whl").write_bytes(b"")
        return []

    monkeypatch.setattr(bundle, "download", download)
    bundle.bundle(tmp_path / "bundle.zip")
    assert "Left out" not in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "bundle.zip") as packed:
        packed.extractall(tmp_path / "input" / "attached")
    home = tmp_path / "input" / "attached" / bundle.TOP
    assert (home / setup.WHEELS.relative_to(ROOT) / "peft-1-py3-none-any.whl").exists()
    monkeypatch.setenv(MIRROR, str(home / "mirror"))
    copy = in_mirror(vit)
    assert copy is not None and not (copy.path / "notes.md").exists()


def test_a_notebook_finds_the_course_in_an_attached_bundle(offline, tmp_path):

    bundle.bundle(tmp_path / "bundle.zip", models=False)
    with zipfile.ZipFile(tmp_path / "bundle.zip") as packed:
        packed.extractall(tmp_path / "input" / "attached")
    (tmp_path / "working").mkdir()
    program = opening.first_cell().replace("; setup()", "")
    done = python(
        "-c",
        f"{program}\nimport helpers; print(helpers.__file__)",
        cwd=tmp_path / "working",
        check=True,
    )
    assert str(tmp_path / "input" / "attached" / bundle.TOP) in done.stdout.replace(
        "working/../", ""
    )


def test_what_a_bundle_carries_leaves_the_host_s_pytorch_alone():
    names = bundle.carried()
    assert {"transformers", "bitsandbytes", "lightning-fabric", "lightning-utilities"} <= set(names)
    assert not {"torch", "numpy", "pandas", "pyarrow", "triton", "ipykernel"} & set(names)


def test_a_package_without_a_wheel_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(bundle, "PYTHONS", ("3.12",))
    assert bundle.download(tmp_path, ["no-such-package-of-anyone"]) == [
        "no-such-package-of-anyone for Python 3.12"
    ]


def test_a_bundle_that_cannot_be_written_leaves_the_old_one(tmp_path):
    (tmp_path / "bundle.zip").write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        bundle.write(tmp_path / "bundle.zip", {"a": tmp_path / "none"})
    assert (tmp_path / "bundle.zip").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.zip"]

"""`make record`: a notebook's runs are kept together and complete, or not at all."""

import os
from dataclasses import replace as change

import pytest

from helpers.recipe import replace
from helpers.record import read
from tests.attack import refused
from tests.small import AFTER, BEFORE, a_run, files_in, notebook, writing
from tight_fit import files
from tight_fit.gpus import REHEARSAL
from tools.course import record
from tools.course.__main__ import main
from tools.course.notebooks import Failed


def test_record_keeps_a_checked_run_under_its_device(folder, tmp_path, capsys):
    path, out = notebook(folder, writing(BEFORE, AFTER)), tmp_path / "results"
    out.mkdir()
    other = {"00_small.before.nvidia-t4.json", "00_smaller.before.cpu.json"}
    for name in other | {"00_small.gone.cpu.json"}:
        (out / name).write_text("{}")
    record.record([path], True, out, "make record-dry")
    assert set(files_in(out)) == other | {"00_small.before.cpu.json", "00_small.after.cpu.json"}
    assert "00_small.after.cpu.json" in capsys.readouterr().out
    for name in other:
        (out / name).unlink()
    assert set(read("00_small", out)) == {"before", "after"}


@pytest.mark.parametrize("words", [["00"], ["--dry-run"]], ids=" ".join)
def test_minutes_are_of_a_whole_recording(words, capsys):
    assert main(["record", "--minutes", "9", *words]) == 1
    assert "--minutes divides a recording of all notebooks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "cell, why",
    [
        (f"{writing(BEFORE)}\n1 / 0", "ZeroDivisionError"),
        (
            f"{writing(BEFORE)}\n(folder / 'a.json').write_text('{{\"name\": 1')",
            "nothing of it was kept, as a.json is no record",
        ),
        (writing(BEFORE, a_run("01_other/before")), "is named '01_other/before'"),
        (
            writing(BEFORE, change(AFTER, recipe=replace(AFTER.recipe, profile="full"))),
            "ran in the full profile",
        ),
        ("x = 1", "wrote no run"),
    ],
)
def test_half_a_record_is_none(folder, tmp_path, cell, why):
    out = tmp_path / "results"
    out.mkdir()
    (out / "00_small.before.cpu.json").write_text("the old one")
    with pytest.raises(Failed, match=why):
        record.record([notebook(folder, cell)], True, out, "make record-dry")
    assert files_in(out) == {"00_small.before.cpu.json": b"the old one"}


def test_a_notebook_that_fails_does_not_stop_the_others(folder, tmp_path, capsys):
    broken = notebook(folder, "1 / 0", name="00_broken")
    good = notebook(folder, writing(BEFORE))
    with pytest.raises(Failed, match="1 of 2 notebooks left no record: 00_broken.ipynb failed"):
        record.record([broken, good], True, tmp_path / "out", "make record-dry")
    assert set(files_in(tmp_path / "out")) == {"00_small.before.cpu.json"}


def test_without_a_hub_the_mini_models_are_recorded_and_named(tmp_path, monkeypatch, capsys):
    gpu = change(
        BEFORE,
        environment={"device": "cuda", "name": "Card X"},
        memory=BEFORE.memory | {"allocated": 1, "reserved": 2, "device": 3},
    )

    def execute(path, environment, until=None):
        (tmp_path / "kept").mkdir(exist_ok=True)
        folder = environment["TIGHT_FIT_RUNS"]
        with open(f"{folder}/00_small.before.json", "w") as file:
            file.write(gpu.to_json())
        return None, 1.0

    monkeypatch.setattr("tools.course.execute.execute", execute)
    monkeypatch.setattr("helpers.profile.usable_cuda", lambda: (True, ""))
    record.record([tmp_path / "00_small.ipynb"], False, tmp_path / "kept", "make record")
    assert "00_small.before.card-x.json  (mini models" in capsys.readouterr().out


def test_a_rehearsal_writes_nothing_to_results(tmp_path, monkeypatch):
    monkeypatch.setattr("helpers.profile.usable_cuda", lambda: (True, ""))
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setenv(REHEARSAL, "T4:1")
    for out in (None, tmp_path / "results", tmp_path / "results" / "deeper"):
        refused(ValueError, "nothing of it is a record", lambda out=out: record.prepare(out))
    assert not (tmp_path / "results").exists()
    assert record.prepare(tmp_path / "session") == tmp_path / "session"


def test_record_wants_a_gpu(folder, monkeypatch):
    monkeypatch.setattr("helpers.profile.usable_cuda", lambda: (False, "no GPU found"))
    with pytest.raises(
        ValueError,
        match="taken on a GPU, and here it cannot be .no GPU found.: try `make record-dry`",
    ):
        record.record([notebook(folder, writing(BEFORE))], False, None, "make record")


def test_record_on_a_gpu_checks_profile_and_device(tmp_path):
    path = tmp_path / "00_small.before.json"
    full = change(BEFORE, recipe=replace(BEFORE.recipe, profile="full"))
    path.write_text(full.to_json())
    with pytest.raises(Failed, match="ran on cpu, not on cuda"):
        record.checked("00_small", tmp_path, "full", "cuda")
    gpu = change(
        full,
        environment={"device": "cuda", "name": "NVIDIA H100 80GB HBM3"},
        memory=full.memory | {"allocated": 1, "reserved": 2, "device": 3},
    )
    path.write_text(gpu.to_json())
    assert set(record.checked("00_small", tmp_path, "full", "cuda")) == {
        "00_small.before.nvidia-h100-80gb-hbm3.json"
    }


def test_replace_all_is_all_or_nothing(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old a")
    (tmp_path / "c").write_text("old c")
    real, calls = os.replace, []

    def breaks(source, target):
        calls.append(target)
        if len(calls) == 4:
            raise OSError("disk")
        real(source, target)

    monkeypatch.setattr(files.os, "replace", breaks)
    with pytest.raises(OSError, match="disk"):
        files.replace_all(tmp_path, {"a": "new a", "b": "new b"}, [tmp_path / "c"])
    assert files_in(tmp_path) == {"a": b"old a", "c": b"old c"}
    monkeypatch.setattr(files.os, "replace", real)
    files.replace_all(tmp_path, {"a": "new a", "b": "new b"}, [tmp_path / "c"])
    assert files_in(tmp_path) == {"a": b"new a", "b": b"new b"}

"""One command for a GPU: in order of value, within the time, checked before it is kept.

The whole of it was rehearsed on a pretended GPU; here its parts are tried with what they may meet.
"""

import json
import time
from dataclasses import replace as change
from functools import partial

import pytest

from benchmarks import gpu_models, measured_steps, proof
from helpers.recipe import Recipe
from tests.benchmarks.test_measured_steps import a_step
from tests.small import a_run
from tests.small import notebook as small_notebook
from tools.course import session
from tools.course.execute import execute
from tools.course.notebooks import Failed, OutOfTime

notebook = partial(small_notebook, name="02_x")
HERE = "Tesla T4, PyTorch 2.13.0, driver 550.54"
RECORDS = "record.run(before, '02_x/before')"  # the code of a lesson that has runs to record
LATER, HUNG = (("a model", name, Recipe()) for name in ("four", "two"))


@pytest.fixture
def calls(monkeypatch):
    """What was run on a machine with a GPU that has little to measure, none of it really."""
    seen = []

    def measure_all(folder, command, until, only=None):
        seen.append("steps" if only is None else only)
        return an_outcome(folder)

    monkeypatch.setattr(session, "one_notebook", lambda path, *rest: seen.append(path.stem))
    monkeypatch.setattr(session, "prepare", lambda out: out)
    monkeypatch.setattr(session, "this_machine", lambda: HERE)
    monkeypatch.setattr(measured_steps, "measure_all", measure_all)
    monkeypatch.setattr(gpu_models, "measure_all", lambda *_: {"steps": {"a": {}}, "failed": {}})
    return seen


def an_outcome(folder, **fields):
    steps = proof.Proof(
        {"name": "Tesla T4", "device": "cuda"}, "", "", [a_step(seconds=0.5)],
        large=["DeBERTa-v3-large, up to fp32"], failed={"a model, two": "it broke"},
    )  # fmt: skip
    return measured_steps.Outcome(folder / "tesla-t4.unfinished", steps, **fields)


def raises(error):
    def broken(*given):
        raise error

    return broken


def told(folder, *paths):
    """What the summary says after one call."""
    assert session.session([*paths], None, folder, "a test") == 1  # as a step failed
    return (folder / session.SUMMARY).read_text()


def test_a_lesson_runs_once_and_again_when_its_code_or_the_machine_changes(
    tmp_path, calls, monkeypatch
):
    path = notebook(tmp_path, RECORDS)
    for _ in range(2):
        told(tmp_path, path)
    assert calls == ["steps", "02_x", "steps"]
    told(tmp_path, notebook(tmp_path, RECORDS, "x = 2"))
    monkeypatch.setattr(session, "this_machine", lambda: "another")
    told(tmp_path, path)
    assert calls.count("02_x") == 3 and set(session.read_state(tmp_path)) == {HERE, "another"}
    (tmp_path / session.SESSION).write_text("[]")
    assert session.read_state(tmp_path) == {}


def test_a_lesson_that_failed_is_tried_again_and_costs_no_other(tmp_path, calls, monkeypatch):
    paths = [notebook(tmp_path, RECORDS, name=name) for name in ("02_x", "03_y")]
    paths.append(notebook(tmp_path, "x = 1", name="13_z"))  # it has no runs to record
    broken = {"02_x": Failed("02_x.ipynb failed in cell 0:\n\n    x"), "03_y": ZeroDivisionError(1)}
    monkeypatch.setattr(session, "one_notebook", lambda path, *_: raises(broken[path.stem])())
    said = told(tmp_path, *paths)
    assert "- FAILED: 02_x: 02_x.ipynb failed in cell 0:\n" in said
    assert "- FAILED: 03_y: ZeroDivisionError: 1\n" in said
    monkeypatch.setattr(session, "one_notebook", lambda path, *rest: calls.append(path.stem))
    assert "2 lessons recorded: 02_x, 03_y." in told(tmp_path, *paths)
    assert calls == ["steps", "steps", "02_x", "03_y"]


def test_what_does_not_fit_into_the_time_is_left(tmp_path, calls, monkeypatch):
    path, done = notebook(tmp_path, "x = 1"), {}
    soon = time.monotonic() + session.FIRST_GUESS / 2
    assert not session.run_one(path, tmp_path, done, "a test", soon) and not calls
    monkeypatch.setattr(session, "one_notebook", raises(OutOfTime("its time was over")))
    assert not session.run_one(path, tmp_path, done, "a test", soon + 100)
    assert done["02_x"]["digest"] == done["02_x"]["error"] == ""  # neither a failure nor done
    done["02_x"]["seconds"] = 100.0  # so it needs half as much again
    for more, begins in ((140, False), (160, True)):
        monkeypatch.setattr(session, "one_notebook", lambda *given, n=more: calls.append(n))
        until = time.monotonic() + more
        assert session.run_one(path, tmp_path, done, "a test", until) == begins
    assert calls == [160]


def test_more_minutes_are_asked_for_what_was_stopped(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(session, "one_notebook", raises(OutOfTime("its time was over")))
    said = told(tmp_path, notebook(tmp_path, RECORDS))
    assert "- Left for another call: 02_x. Call it again to go on.\n" in said
    assert "- Stopped; give more MINUTES: 02_x (0.0 min).\n" in said and "FAILED: 02_x" not in said


def test_a_notebook_is_stopped_when_its_time_is_over(tmp_path):
    path = notebook(tmp_path, "import time", "time.sleep(60)")
    begun = time.monotonic()
    with pytest.raises(OutOfTime, match="stopped when its time was over"):
        execute(path, {}, until=begun + 6)
    assert time.monotonic() - begun < 40


def test_the_summary_says_what_to_do_next(tmp_path, calls, monkeypatch, capsys):
    note = "This GPU has no bf16 arithmetic."
    steps = an_outcome(tmp_path, left=["a model, three"], note=note)
    monkeypatch.setattr(measured_steps, "measure_all", lambda *given: steps)
    said = told(tmp_path, notebook(tmp_path, RECORDS))
    assert said in capsys.readouterr().out
    for words in (
        HERE,
        f"1 steps measured, 1 too large for this GPU. {note}",
        "1 lessons recorded: 02_x",
        "FAILED: a model, two: it broke",
        "Left for another call: a model, three.",
        "1 steps of other models measured, 0 failed, 49 left.",
        "python -m tools.course keep",
    ):
        assert words in said, words


def test_what_failed_before_waits_until_the_lessons_had_their_turn(tmp_path, calls, monkeypatch):
    def measure_all(folder, command, until, only):
        calls.append("steps" if only is None else only)
        left = ["a model, three"] if only is None else []
        return an_outcome(tmp_path, left=left, put_off=[HUNG, LATER])

    monkeypatch.setattr(measured_steps, "measure_all", measure_all)
    said = told(tmp_path, notebook(tmp_path, RECORDS))
    assert calls == ["steps", "02_x", [HUNG, LATER]]
    assert "Left for another call: a model, three; a model, four." in said
    assert said.count("a model, two") == 1, "it failed, and is not left as well"


@pytest.mark.parametrize(
    "module, says", [(measured_steps, "FAILED: the steps: "), (gpu_models, "")]
)
def test_whatever_steps_and_other_models_raise_the_lessons_run(
    tmp_path, calls, monkeypatch, module, says
):
    monkeypatch.setattr(module, "measure_all", raises(OSError("full")))
    said = told(tmp_path, notebook(tmp_path, RECORDS))
    assert calls[-1] == "02_x" and f"{says}OSError: full" in said


def test_without_jupyter_the_steps_are_measured_all_the_same(tmp_path, calls, monkeypatch):
    there = session.find_spec
    monkeypatch.setattr(session, "find_spec", lambda n: None if n == "nbclient" else there(n))
    said = told(tmp_path, notebook(tmp_path, RECORDS))
    assert calls == ["steps"] and "1 steps measured" in said
    assert "No lesson is run, as nbclient is not installed here." in said


# -- keep


GPU = {"device": "cuda", "name": "Tesla T4"}


def a_folder(folder, environment):
    figures = {"tracked": 9, "allocated": 9, "reserved": 9, "device": 9, "at_peak": {}}
    run = change(a_run(), environment=environment, memory=figures)
    models = folder / "models"
    models.mkdir(parents=True)
    (folder / f"{run.name.replace('/', '.')}.json").write_text(run.to_json())
    (folder / session.SESSION).write_text("{}")
    proof.write(proof.Proof(environment, "", "", [a_step()]), folder / "steps", finished=False)
    real = {"environment": environment, "steps": {}, "failed": {}}
    (models / "any.json").write_text(json.dumps(real))
    return run


def test_what_is_kept_has_been_read_back(tmp_path):
    run = a_folder(tmp_path / "out", GPU)
    names = session.keep(tmp_path / "out", tmp_path / "results")
    label = run.name.replace("/", ".")
    assert names == [f"{label}.tesla-t4.json", "steps/tesla-t4.json", "models/tesla-t4.json"]
    assert (tmp_path / "results" / names[0]).read_text() == run.to_json()
    assert all((tmp_path / "results" / name).exists() for name in names)


@pytest.mark.parametrize("kind", ["*.json", "steps/*", "models/*"])
@pytest.mark.parametrize(
    "environment, says",
    [(GPU | {"rehearsal": "T4:1"}, "of a rehearsal"), (GPU | {"device": "cpu"}, "not taken on")],
)
def test_what_is_no_record_is_not_kept(tmp_path, environment, says, kind):
    a_folder(tmp_path / "out", environment)
    for other in {"*.json", "steps/*", "models/*"} - {kind}:
        for path in (tmp_path / "out").glob(other):
            path.unlink()
    with pytest.raises(ValueError, match=says):
        session.keep(tmp_path / "out", tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_steps_of_several_versions_are_all_kept(tmp_path):
    folder, results = tmp_path / "out", tmp_path / "results"
    for torch, date, finished in (("2.12", "2026-01-02", True), ("2.13", "2026-01-01", False)):
        made = proof.Proof(GPU | {"torch": torch}, date, "", [a_step()])
        proof.write(made, folder / "steps", finished)
    empty = proof.Proof(GPU | {"torch": "2.14"}, "2026-01-03", "", [], failed={"one": "it broke"})
    proof.write(empty, folder / "steps", finished=False)
    session.keep(folder, results)
    kept = {path.name: proof.Proof.from_json(path.read_text()) for path in results.rglob("*.json")}
    versions = {name: made.environment["torch"] for name, made in kept.items()}
    assert versions == {"tesla-t4.json": "2.12", "tesla-t4.pytorch-2-13.json": "2.13"}

"""One command for a GPU: in order of value, within the time, checked before it is kept.

The whole of it was rehearsed on a pretended GPU; here its parts are tried with what they may meet.
"""

import json
import time
from dataclasses import replace as change
from functools import partial

import psutil
import pytest

from benchmarks import gpu_models, measured_steps, proof
from helpers.recipe import Recipe
from tests.benchmarks.test_measured_steps import a_step
from tests.small import a_run
from tests.small import notebook as small_notebook
from tools.course import preflight, session, session_state
from tools.course.execute import execute
from tools.course.notebooks import Failed, OutOfTime
from tools.course.session_state import CallTime, Entry, SessionState

notebook = partial(small_notebook, name="02_x")
FOREVER = CallTime()
HERE = "Tesla T4, PyTorch 2.13.0, driver 550.54"


def state_of(folder):
    return SessionState.read(folder, HERE)


@pytest.fixture
def calls(monkeypatch):
    """The notebooks that were run, none of them really."""
    seen = []
    monkeypatch.setattr(session, "one_notebook", lambda path, *rest: seen.append(path.stem))
    return seen


def test_a_lesson_runs_once_and_again_when_its_code_changes(tmp_path, calls):
    path, state = notebook(tmp_path, "x = 1"), SessionState(HERE)
    for _ in range(2):
        assert session.run_one(path, tmp_path, state_of(tmp_path), "a test", FOREVER)
    assert calls == ["02_x"] and not state_of(tmp_path).notebooks["02_x"].error
    notebook(tmp_path, "x = 2")
    assert session.run_one(path, tmp_path, state_of(tmp_path), "a test", FOREVER)
    assert calls == ["02_x", "02_x"] and not state.notebooks


def test_a_lesson_that_failed_is_tried_again(tmp_path, calls, monkeypatch):
    path = notebook(tmp_path, "x = 1")

    def fails(*given):
        raise Failed("02_x.ipynb failed in cell 0:\n\n    x = 1")

    monkeypatch.setattr(session, "one_notebook", fails)
    state = SessionState(HERE)
    assert session.run_one(path, tmp_path, state, "a test", FOREVER)
    assert state.notebooks["02_x"].error == "02_x.ipynb failed in cell 0:"
    monkeypatch.setattr(session, "one_notebook", lambda path, *rest: calls.append(path.stem))
    assert session.run_one(path, tmp_path, state_of(tmp_path), "a test", FOREVER)
    assert calls == ["02_x"] and not state_of(tmp_path).notebooks["02_x"].error


def test_what_does_not_fit_into_the_time_is_left(tmp_path, calls, monkeypatch):
    path, state = notebook(tmp_path, "x = 1"), SessionState(HERE)
    soon = CallTime(time.monotonic() + session_state.FIRST_GUESS / 2)
    assert not session.run_one(path, tmp_path, state, "a test", soon) and not calls

    def too_slow(*given):
        raise OutOfTime("its time was over")

    monkeypatch.setattr(session, "one_notebook", too_slow)
    assert not session.run_one(path, tmp_path, state, "a test", CallTime(time.monotonic() + 100))
    kept = state_of(tmp_path).notebooks["02_x"]
    assert not kept.digest and not kept.error  # it is no failure, and it is not done


def test_a_notebook_is_stopped_when_its_time_is_over(tmp_path):
    path = notebook(tmp_path, "import time", "time.sleep(60)")
    begun = time.monotonic()
    with pytest.raises(OutOfTime, match="stopped when its time was over"):
        execute(path, {}, until=begun + 6)
    assert time.monotonic() - begun < 40


LEFT, LATER, HUNG = (("a model", name, Recipe()) for name in ("three", "four", "two"))


def an_outcome(folder, **fields):
    steps = proof.Proof(
        {"name": "Tesla T4", "device": "cuda"}, "", "", [a_step(seconds=0.5)],
        large=["DeBERTa-v3-large, up to fp32"], failed={"a model, two": "it broke"},
    )  # fmt: skip
    return measured_steps.Outcome(folder / "steps/tesla-t4.unfinished", steps, **fields)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """`session.session` as on a machine with a GPU, which has nothing to measure."""
    monkeypatch.setattr(session, "prepare", lambda out: out)
    monkeypatch.setattr(session, "this_machine", lambda: HERE)
    monkeypatch.setattr(measured_steps, "measure_all", lambda folder, *_: an_outcome(folder))
    monkeypatch.setattr(gpu_models, "measure_all", lambda *_: {"steps": {"a": {}}, "failed": {}})


def test_the_summary_says_what_to_do_next(tmp_path, calls, on_a_gpu, monkeypatch, capsys):
    note = "This GPU has no bf16 arithmetic."
    steps = an_outcome(tmp_path, left=["a model, three"], note=note)
    monkeypatch.setattr(measured_steps, "measure_all", lambda *given: steps)
    path = notebook(tmp_path, "record.run(before, '02_x/before')")
    without = notebook(tmp_path, "x = 1", name="13_y")  # it has no runs to record
    # All the time there is: minutes count from the start of the process, here that of all tests.
    assert session.session([path, without], None, tmp_path, "a test") == 1  # as a step failed
    assert calls == ["02_x"]
    text = (tmp_path / session.SUMMARY).read_text()
    assert text in capsys.readouterr().out
    for words in (
        HERE,
        f"1 steps measured, 1 too large for this GPU. {note}",
        "1 lessons recorded: 02_x",
        "FAILED: a model, two: it broke",
        "Left for another call: 1 steps (a model, three), 0 lessons.",
        "1 steps of other models measured, 0 failed, 49 left.",
        "python -m tools.course keep",
    ):
        assert words in text, words


def test_what_failed_before_waits_until_the_lessons_had_their_turn(
    tmp_path, calls, on_a_gpu, monkeypatch
):
    def measure_all(folder, command, until, only):
        calls.append("steps" if only is None else only)
        if only is None:
            return an_outcome(tmp_path, left=[measured_steps.name_of(LEFT)], put_off=[HUNG, LATER])
        return an_outcome(tmp_path, put_off=[LATER, HUNG])

    monkeypatch.setattr(measured_steps, "measure_all", measure_all)
    path = notebook(tmp_path, "record.run(before, '02_x/before')")
    session.session([path], None, tmp_path, "a test")
    assert calls == ["steps", "02_x", [HUNG, LATER]]
    text = (tmp_path / session.SUMMARY).read_text()
    assert "Left for another call: 2 steps (a model, three; a model, four), 0 lessons." in text
    assert text.count("a model, two") == 1, "it failed, and is not left as well"


def test_other_models_cost_no_lesson_and_are_kept(tmp_path, calls, on_a_gpu, monkeypatch):
    def broken(*given):
        raise OSError("full")

    monkeypatch.setattr(gpu_models, "measure_all", broken)
    path = notebook(tmp_path, "record.run(before, '02_x/before')")
    session.session([path], None, tmp_path, "a test")
    told = (tmp_path / session.SUMMARY).read_text()
    assert calls == ["02_x"] and "Other models ended early: OSError: full" in told
    real = {"environment": {"device": "cuda", "name": "Tesla T4"}, "steps": {}, "failed": {}}
    pretended = real | {"environment": real["environment"] | {"rehearsal": True}}
    (tmp_path / "taken" / "models").mkdir(parents=True)
    file = tmp_path / "taken" / "models" / "any.json"
    for text in ("[]", "{", json.dumps(pretended)):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"any\.json"):
            session.keep(tmp_path / "taken", tmp_path / "results")
    file.write_text(json.dumps(real))
    assert session.keep(tmp_path / "taken", tmp_path / "results") == ["models/tesla-t4.json"]
    kept = (tmp_path / "results" / "models" / "tesla-t4.json").read_text()
    assert json.loads(kept) == real


@pytest.mark.parametrize(
    "error", [ValueError("no file of steps"), OSError("full"), IndexError("no line")]
)
def test_whatever_the_steps_raise_the_lessons_run(tmp_path, calls, on_a_gpu, monkeypatch, error):
    def broken(*given):
        raise error

    monkeypatch.setattr(measured_steps, "measure_all", broken)
    path = notebook(tmp_path, "record.run(before, '02_x/before')")
    assert session.session([path], None, tmp_path, "a test") == 1 and calls == ["02_x"]
    text = (tmp_path / session.SUMMARY).read_text()
    assert f"- FAILED: the steps: {type(error).__name__}: {error}" in text
    assert "1 lessons recorded: 02_x" in text


def test_a_lesson_that_ends_by_an_error_of_ours_does_not_cost_the_others(
    tmp_path, on_a_gpu, monkeypatch
):
    def fails(path, *rest):
        if path.stem == "02_x":
            raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(session, "one_notebook", fails)
    paths = [notebook(tmp_path, "record.run(x)", name=name) for name in ("02_x", "03_y")]
    session.session(paths, None, tmp_path, "a test")
    kept = state_of(tmp_path).notebooks
    assert kept["02_x"].error == "ZeroDivisionError: by nothing" and not kept["03_y"].error


def test_without_jupyter_the_steps_are_measured_all_the_same(
    tmp_path, calls, on_a_gpu, monkeypatch, capsys
):
    there = preflight.find_spec
    lacking = ("nbclient", "accelerate")
    monkeypatch.setattr(
        preflight, "find_spec", lambda name: None if name in lacking else there(name)
    )
    path = notebook(tmp_path, "record.run(before, '02_x/before')")
    session.session([path], None, tmp_path, "a test")
    said = capsys.readouterr().out.splitlines()[0]
    assert said == (
        "Not installed here: nbclient (so no lesson is run); accelerate (so its estimates are not "
        "shown beside the steps)."
    )
    text = (tmp_path / session.SUMMARY).read_text()
    assert not calls and "1 steps measured" in text
    assert "- Left out: no lesson is run, as nbclient is not installed here." in text


def test_another_gpu_or_version_records_the_lessons_anew_and_keeps_the_others(tmp_path, calls):
    path, other = notebook(tmp_path, "x = 1"), "NVIDIA H200, PyTorch 2.13.0, driver 550.54"
    for machine in (HERE, other, HERE, other):
        state = SessionState.read(tmp_path, machine)
        assert session.run_one(path, tmp_path, state, "a test", FOREVER)
    assert calls == ["02_x", "02_x"]
    assert set(json.loads((tmp_path / session.STATE).read_text())["machines"]) == {HERE, other}


def test_a_lesson_that_was_stopped_begins_again_in_a_call_of_the_same_length():
    whole = CallTime(float("inf"), 400.0)
    stopped = Entry("", 390.0)
    assert session_state.guess(stopped, whole) == 400 and not session_state.too_long(stopped, whole)
    assert session_state.guess(Entry("", 100.0), whole) == 150
    assert session_state.guess(None, CallTime(float("inf"), 10.0)) == 10


def test_a_lesson_that_a_whole_call_cannot_hold_asks_for_more_minutes(
    tmp_path, calls, on_a_gpu, monkeypatch
):
    minutes = (time.time() - psutil.Process().create_time()) / 60 + 9  # from this process's start
    path = notebook(tmp_path, "record.run(before, '02_x/before')")
    SessionState(HERE, {"02_x": Entry("", 60 * minutes)}).write(tmp_path)
    assert session.session([path], minutes, tmp_path, "a test") == 1 and not calls
    text = (tmp_path / session.SUMMARY).read_text()
    assert "- FAILED: 02_x: it was stopped after" in text and "twice the MINUTES" in text
    assert "Left for another call" not in text
    session.session([path], 3 * minutes, tmp_path, "a test")
    assert calls == ["02_x"]


def a_folder(folder, environment):
    figures = {"tracked": 9, "allocated": 9, "reserved": 9, "device": 9, "at_peak": {}}
    run = change(a_run(), environment=environment, memory=figures)
    (folder / "steps").mkdir(parents=True)
    (folder / f"{run.name.replace('/', '.')}.json").write_text(run.to_json())
    (folder / session.STATE).write_text("{}")
    proof.write(proof.Proof(environment, "", "", [a_step()]), folder / "steps", finished=False)
    return run


GPU = {"device": "cuda", "name": "Tesla T4"}


def test_what_is_kept_has_been_read_back(tmp_path):
    run = a_folder(tmp_path / "out", GPU)
    names = session.keep(tmp_path / "out", tmp_path / "results")
    label = run.name.replace("/", ".")
    assert names == [f"{label}.tesla-t4.json", "steps/tesla-t4.json"]
    assert (tmp_path / "results" / names[0]).read_text() == run.to_json()
    assert (tmp_path / "results" / names[1]).exists()


@pytest.mark.parametrize(
    "environment, says",
    [(GPU | {"rehearsal": "T4:1"}, "of a rehearsal"), (GPU | {"device": "cpu"}, "not taken on")],
)
def test_what_is_no_record_is_not_kept(tmp_path, environment, says):
    a_folder(tmp_path / "out", environment)
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


def test_the_digest_is_of_code_alone(tmp_path):
    path = notebook(tmp_path, "x = 1")
    before = session.digest(path)
    content = json.loads(path.read_text())
    content["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "1"}]
    content["cells"].append({"cell_type": "markdown", "source": ["words"], "metadata": {}})
    path.write_text(json.dumps(content))
    assert session.digest(path) == before
    assert session.digest(notebook(tmp_path, "x = 2")) != before

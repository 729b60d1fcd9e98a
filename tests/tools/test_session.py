"""One command for a GPU: in order of value, within the time, checked before it is kept.

The whole of it was rehearsed on a pretended GPU; here its parts are tried with what they may meet.
"""

import json
import time
from dataclasses import replace as change

import nbformat
import pytest

from benchmarks import gpu_steps, proof
from tests.benchmarks.test_measured_steps import a_step
from tests.small import a_run
from tools.course import session
from tools.course.execute import execute
from tools.course.notebooks import Failed, OutOfTime, chosen
from tools.course.session import SessionState

FOREVER = float("inf")


def notebook(folder, *cells, name="02_x"):
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbformat.write(made, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


@pytest.fixture
def calls(monkeypatch):
    """The notebooks that were run, none of them really."""
    seen = []
    monkeypatch.setattr(session, "one_notebook", lambda path, *rest: seen.append(path.stem))
    return seen


def test_the_lessons_that_say_the_most_come_first():
    paths = chosen()
    ordered = [path.name[:2] for path in session.in_order(paths)]
    assert ordered[: len(session.ORDER)] == list(session.ORDER)
    assert sorted(ordered) == sorted(path.name[:2] for path in paths)


def test_a_lesson_runs_once_and_again_when_its_code_changes(tmp_path, calls):
    path, state = notebook(tmp_path, "x = 1"), SessionState()
    for _ in range(2):
        assert session.run_one(path, tmp_path, SessionState.read(tmp_path), "a test", FOREVER)
    assert calls == ["02_x"] and not SessionState.read(tmp_path).notebooks["02_x"].error
    notebook(tmp_path, "x = 2")
    assert session.run_one(path, tmp_path, SessionState.read(tmp_path), "a test", FOREVER)
    assert calls == ["02_x", "02_x"] and not state.notebooks


def test_a_lesson_that_failed_is_tried_again(tmp_path, calls, monkeypatch):
    path = notebook(tmp_path, "x = 1")

    def fails(*given):
        raise Failed("02_x.ipynb failed in cell 0:\n\n    x = 1")

    monkeypatch.setattr(session, "one_notebook", fails)
    state = SessionState()
    assert session.run_one(path, tmp_path, state, "a test", FOREVER)
    assert state.notebooks["02_x"].error == "02_x.ipynb failed in cell 0:"
    monkeypatch.setattr(session, "one_notebook", lambda path, *rest: calls.append(path.stem))
    assert session.run_one(path, tmp_path, SessionState.read(tmp_path), "a test", FOREVER)
    assert calls == ["02_x"] and not SessionState.read(tmp_path).notebooks["02_x"].error


def test_what_does_not_fit_into_the_time_is_left(tmp_path, calls, monkeypatch):
    path, state = notebook(tmp_path, "x = 1"), SessionState()
    soon = time.monotonic() + session.FIRST_GUESS / 2
    assert not session.run_one(path, tmp_path, state, "a test", soon) and not calls

    def too_slow(*given):
        raise OutOfTime("its time was over")

    monkeypatch.setattr(session, "one_notebook", too_slow)
    assert not session.run_one(path, tmp_path, state, "a test", time.monotonic() + 100)
    kept = SessionState.read(tmp_path).notebooks["02_x"]
    assert not kept.digest and not kept.error  # it is no failure, and it is not done


def test_a_notebook_is_stopped_when_its_time_is_over(tmp_path):
    path = notebook(tmp_path, "import time", "time.sleep(60)")
    begun = time.monotonic()
    with pytest.raises(OutOfTime, match="stopped when its time was over"):
        execute(path, {}, until=begun + 6)
    assert time.monotonic() - begun < 40


@pytest.mark.parametrize("text", ["", "{", "[]", '{"notebooks": {"x": {"seconds": 1}}}'])
def test_a_state_that_cannot_be_read_is_a_new_one(tmp_path, text):
    (tmp_path / session.STATE).write_text(text)
    assert SessionState.read(tmp_path).notebooks == {}


def test_the_summary_says_what_to_do_next(tmp_path, calls, monkeypatch, capsys):
    steps = gpu_steps.Outcome(
        tmp_path / "steps/tesla-t4.unfinished",
        proof.Proof({"name": "Tesla T4", "device": "cuda"}, "", "", [a_step(seconds=0.5)]),
        large=["DeBERTa-v3-large, up to fp32"],
        failed={"a model, two": "it broke"},
        left=["a model, three"],
    )
    monkeypatch.setattr(gpu_steps, "measure_all", lambda *given: steps)
    monkeypatch.setattr(session, "prepare", lambda out: out)
    path = notebook(tmp_path, "record.run(before, '02_x/before')")
    without = notebook(tmp_path, "x = 1", name="13_y")  # it has no runs to record
    # All the time there is: minutes count from the start of the process, here that of all tests.
    assert session.session([path, without], None, tmp_path, "a test") == 1  # as a step failed
    assert calls == ["02_x"]
    text = (tmp_path / session.SUMMARY).read_text()
    assert text in capsys.readouterr().out
    for words in (
        "1 steps measured, 1 too large",
        "1 lessons recorded: 02_x",
        "FAILED: a model, two: it broke",
        "Left for another call: 1 steps (a model, three), 0 lessons.",
        "python -m tools.course keep",
    ):
        assert words in text, words


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


def test_half_a_file_and_no_file_are_refused(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="holds no result of a session"):
        session.keep(tmp_path / "out", tmp_path / "results")
    run = a_folder(tmp_path / "other", GPU)
    file = tmp_path / "other" / f"{run.name.replace('/', '.')}.json"
    file.write_text(file.read_text()[:-50])
    with pytest.raises(ValueError, match="is no record"):
        session.keep(tmp_path / "other", tmp_path / "results")


def test_make_names_what_the_command_takes():
    makefile = (session.ROOT / "Makefile").read_text(encoding="utf8")
    for words in ("--minutes $(MINUTES)", "--out $(OUT)", "$(WHEELS)/*.whl", "TIGHT_FIT_MIRROR"):
        assert words in makefile, words


def test_the_digest_is_of_code_alone(tmp_path):
    path = notebook(tmp_path, "x = 1")
    before = session.digest(path)
    content = json.loads(path.read_text())
    content["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "1"}]
    content["cells"].append({"cell_type": "markdown", "source": ["words"], "metadata": {}})
    path.write_text(json.dumps(content))
    assert session.digest(path) == before
    assert session.digest(notebook(tmp_path, "x = 2")) != before

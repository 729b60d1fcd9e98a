"""Steps on a GPU within a given time: kept one by one, gone on with, never mixed with a rehearsal.

What runs on a GPU itself is tried on a pretended one; here its answers are given.
"""

import json
import time

import pytest

from benchmarks import gpu_steps, proof
from helpers.recipe import Recipe
from tests.benchmarks.test_measured_steps import a_step

GPU = {"device": "cuda", "name": "Tesla T4", "torch": "2.13.0"}
CASES = [("a model", name, Recipe(weights="random")) for name in ("one", "two", "three")]


def answered(case, until, **fields):
    return a_step(model=case[0], technique=case[1], reserved=2000, seconds=0.5, **fields)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(gpu_steps, "environment", lambda device: dict(GPU))
    monkeypatch.setattr(gpu_steps, "cases", lambda: list(CASES))
    monkeypatch.setattr(gpu_steps, "_apart", answered)


def test_each_step_is_written_at_once_and_the_file_gets_its_name_at_the_end(
    machine, monkeypatch, tmp_path
):
    seen = []

    def watched(case, until):
        seen.append(sorted(path.name for path in tmp_path.glob("*")))
        return answered(case, until, planned_seconds=0.4)

    monkeypatch.setattr(gpu_steps, "_apart", watched)
    outcome = gpu_steps.measure_all(tmp_path, "a test", jobs=1)
    assert seen == [[], ["tesla-t4.unfinished"], ["tesla-t4.unfinished"]]
    assert [path.name for path in tmp_path.glob("*")] == ["tesla-t4.json"]
    kept = proof.Proof.from_json((tmp_path / "tesla-t4.json").read_text())
    assert [step.technique for step in kept.steps] == ["one", "two", "three"]
    assert (kept.steps[0].seconds, kept.steps[0].planned_seconds) == (0.5, 0.4)
    assert not (outcome.left or outcome.failed or outcome.large)
    assert "seconds, planned" in str(proof.table(kept))


def test_a_later_call_measures_only_what_is_missing(machine, monkeypatch, tmp_path):
    def two_alone(case, until):
        if case[1] == "one":
            raise TimeoutError
        if case[1] == "three":
            raise RuntimeError("it broke")
        return answered(case, until)

    monkeypatch.setattr(gpu_steps, "_apart", two_alone)
    first = gpu_steps.measure_all(tmp_path, "a test")
    assert first.left == ["a model, one"] and first.failed == {"a model, three": "it broke"}
    assert first.file == tmp_path / "tesla-t4.unfinished"
    asked = []

    def others(case, until):
        asked.append(case[1])
        return answered(case, until)

    monkeypatch.setattr(gpu_steps, "_apart", others)
    second = gpu_steps.measure_all(tmp_path, "a test")
    assert sorted(asked) == ["one", "three"] and second.file == tmp_path / "tesla-t4.json"
    assert [step.technique for step in second.proof.steps] == ["one", "two", "three"]


@pytest.mark.parametrize("change", [{"torch": "2.14.0"}, {"rehearsal": "T4:1"}])
def test_steps_of_another_machine_are_not_gone_on_with(machine, monkeypatch, tmp_path, change):
    gpu_steps.measure_all(tmp_path, "a test")
    monkeypatch.setattr(gpu_steps, "environment", lambda device: GPU | change)
    monkeypatch.setattr(gpu_steps, "_apart", lambda case, until: None)
    outcome = gpu_steps.measure_all(tmp_path, "a test")
    assert len(outcome.large) == 3 and not outcome.proof.steps


def test_without_time_no_process_starts(monkeypatch):
    monkeypatch.setattr(gpu_steps.subprocess, "run", pytest.fail)
    for left in (gpu_steps.SECONDS - 1, 0, -100):
        with pytest.raises(TimeoutError):
            gpu_steps._apart(CASES[0], time.monotonic() + left)


def test_a_step_of_before_has_no_seconds():
    values = a_step().to_dict()
    del values["seconds"], values["planned_seconds"]
    assert proof.Step.from_dict(json.loads(json.dumps(values))).seconds is None

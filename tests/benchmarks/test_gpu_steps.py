"""Steps on a GPU within a given time: kept one by one, gone on with, never mixed with a rehearsal.

What runs on a GPU itself is tried on a pretended one; here its answers are given.
"""

import sys
import threading
import time

import pytest
import torch

from benchmarks import apart, gpu_steps, proof
from benchmarks.measured_steps import LARGE, cases
from helpers.recipe import Recipe
from tests.benchmarks.test_measured_steps import a_step
from tight_fit import gpus
from tight_fit.optimizer_kinds import OPTIMIZERS
from tight_fit.techniques.optimizers import make_optimizer

GPU = {"device": "cuda", "name": "Tesla T4", "torch": "2.13.0"}
UNFINISHED = "tesla-t4.pytorch-2-13-0.unfinished"
CASES = [("a model", name, Recipe(weights="random")) for name in ("one", "two", "three")]


APART, EVERY_CASE = gpu_steps._apart, gpu_steps.every_case


def answered(case, *_, **fields):
    return a_step(model=case[0], technique=case[1], reserved=2000, seconds=0.5, **fields)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(gpu_steps, "environment", lambda device: dict(GPU))
    monkeypatch.setattr(gpu_steps, "every_case", lambda count, bf16: list(CASES))
    monkeypatch.setattr(gpu_steps, "_apart", answered)


def test_each_step_is_written_at_once_and_the_file_gets_its_name_at_the_end(
    machine, monkeypatch, tmp_path
):
    seen = []

    def watched(case, *_):
        seen.append(sorted(path.name for path in tmp_path.glob("*")))
        return answered(case, planned_seconds=0.4)

    monkeypatch.setattr(gpu_steps, "_apart", watched)
    outcome = gpu_steps.measure_all(tmp_path, "a test", jobs=1)
    assert seen == [[], [UNFINISHED], [UNFINISHED]]
    assert [path.name for path in tmp_path.glob("*")] == ["tesla-t4.json"]
    kept = proof.Proof.from_json((tmp_path / "tesla-t4.json").read_text())
    assert [step.technique for step in kept.steps] == ["one", "two", "three"]
    assert (kept.steps[0].seconds, kept.steps[0].planned_seconds) == (0.5, 0.4)
    assert not (outcome.left or outcome.put_off or kept.failed or kept.large)
    assert "seconds, planned" in str(proof.table(kept))


def test_a_later_call_measures_only_what_is_missing(machine, monkeypatch, tmp_path):
    def two_alone(case, *_):
        if case[1] == "one":
            raise TimeoutError
        if case[1] == "three":
            raise RuntimeError("it broke")
        return answered(case)

    monkeypatch.setattr(gpu_steps, "_apart", two_alone)
    first = gpu_steps.measure_all(tmp_path, "a test")
    assert first.left == ["a model, one"] and first.proof.failed == {"a model, three": "it broke"}
    assert first.file == tmp_path / UNFINISHED
    asked = []

    def others(case, *_):
        asked.append(case[1])
        return answered(case)

    monkeypatch.setattr(gpu_steps, "_apart", others)
    second = gpu_steps.measure_all(tmp_path, "a test")
    assert asked == ["one"] and second.file == tmp_path / UNFINISHED
    third = gpu_steps.measure_all(tmp_path, "a test", only=second.put_off)
    assert asked == ["one", "three"] and third.file == tmp_path / "tesla-t4.json"
    assert [step.technique for step in third.proof.steps] == ["one", "two", "three"]
    assert not third.proof.failed


@pytest.mark.parametrize(
    "error, says",
    [
        (RuntimeError("It gave no answer."), "It gave no answer."),
        (apart.Hung("It was not done."), "It was not done."),
        (IndexError("list index\nout of range"), "IndexError: list index out of range"),
    ],
)
def test_whatever_a_step_raises_the_others_are_measured(
    machine, monkeypatch, tmp_path, capsys, error, says
):
    def one_breaks(case, *_):
        if case[1] == "one":
            raise error
        return answered(case)

    monkeypatch.setattr(gpu_steps, "_apart", one_breaks)
    outcome = gpu_steps.measure_all(tmp_path, "a test")
    assert outcome.proof.failed == {"a model, one": says} and len(outcome.proof.steps) == 2
    assert f"a model, one: FAILED. {says}" in capsys.readouterr().out


def test_no_time_is_left_for_what_failed_before_it_stays_a_failure(machine, monkeypatch, tmp_path):
    def failing(case, *_):
        raise RuntimeError("it broke")

    monkeypatch.setattr(gpu_steps, "_apart", failing)
    gpu_steps.measure_all(tmp_path, "a test")
    again = gpu_steps.measure_all(tmp_path, "a test")
    assert again.put_off == CASES

    def no_time(case, *_):
        raise TimeoutError

    monkeypatch.setattr(gpu_steps, "_apart", no_time)
    last = gpu_steps.measure_all(tmp_path, "a test", only=again.put_off)
    assert not last.left and len(last.proof.failed) == 3


def test_a_step_that_is_too_large_is_planned_once(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_steps, "_apart", lambda *_: None)
    gpu_steps.measure_all(tmp_path, "a test")
    monkeypatch.setattr(gpu_steps, "_apart", lambda *_: pytest.fail("it was planned again"))
    again = gpu_steps.measure_all(tmp_path, "a test")
    assert sorted(again.proof.large) == sorted(map(gpu_steps.name_of, CASES))


def test_a_gpu_without_bf16_measures_no_step_in_it(monkeypatch, machine, tmp_path):
    found = EVERY_CASE(2, bf16=False)
    assert not [case for case in found if case[-1].precision == "bf16"]
    left_out = {case[:2] for case in EVERY_CASE(2)} - {case[:2] for case in found}
    assert left_out == {case[:2] for case in cases() if case[0] != LARGE and "bf16" in case[1]}
    ladder = {case[1]: case[-1] for case in found if case[0] == LARGE}
    assert ladder["up to mixed precision"].precision == "fp16" and "up to LoRA" in ladder
    asked = []
    monkeypatch.setattr(gpu_steps, "every_case", lambda count, bf16: asked.append(bf16) or [])
    for name, told in (("T4", True), ("A100-40GB", False)):
        monkeypatch.setattr(gpus, "here", lambda name=name: gpus.GPUS[name])
        note = gpu_steps.measure_all(tmp_path, "a test").note
        assert ("bf16 are left out" in note) == told and bool(note) == told
    assert asked == [False, True]


def test_steps_whose_package_is_missing_are_left_out_and_no_failure(machine, monkeypatch, tmp_path):
    lacking = {"bitsandbytes", "peft"}
    others = {"adapters": Recipe(lora_rank=4), "8 bits": Recipe(optimizer="lion8bit")}
    mixed = [CASES[0], *(("a model", name, recipe) for name, recipe in others.items())]
    monkeypatch.setattr(gpu_steps, "every_case", lambda count, bf16: mixed)
    monkeypatch.setattr(gpus, "here", lambda: gpus.GPUS["A100-40GB"])
    monkeypatch.setattr(gpu_steps, "not_installed", lambda *names: [*lacking & set(names)])
    first = gpu_steps.measure_all(tmp_path, "a test", jobs=1)
    assert len(first.proof.steps) == 1 and not first.proof.failed
    assert first.note == "2 steps wait for bitsandbytes and peft to be installed."
    assert first.file.suffix == ".unfinished"
    lacking.clear()
    assert len(gpu_steps.measure_all(tmp_path, "a test", jobs=1).proof.steps) == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_packages_of_an_optimizer_are_those_that_it_imports(optimizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    base = "bf16" if "stochastic" in optimizer else "fp32"
    recipe, layer = Recipe(optimizer=optimizer, base=base), torch.nn.Linear(2, 2)
    layer.to(torch.bfloat16 if base == "bf16" else torch.float32)
    if not gpu_steps.packages(recipe):
        make_optimizer(layer, recipe)
        return
    with pytest.raises(ImportError):
        make_optimizer(layer, recipe)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("change", [{"torch": "2.14.0"}, {"driver": "570.1"}, {"cuda": "13.0"}])
def test_steps_of_other_versions_are_never_overwritten(
    machine, monkeypatch, tmp_path, change, finished
):
    def no_time_for_the_third(case, *_):
        if case[1] == "three" and not finished:
            raise TimeoutError
        return answered(case)

    monkeypatch.setattr(gpu_steps, "_apart", no_time_for_the_third)
    before = gpu_steps.measure_all(tmp_path, "a test").proof
    monkeypatch.setattr(gpu_steps, "environment", lambda device: GPU | change)
    other = gpu_steps.measure_all(tmp_path, "a test").proof
    assert other.environment == GPU | change
    for environment, kept in ((GPU, before), (GPU | change, other)):
        assert proof.read_one(tmp_path, environment) == kept
    monkeypatch.setattr(gpu_steps, "environment", lambda device: GPU)
    monkeypatch.setattr(gpu_steps, "_apart", answered)
    back = gpu_steps.measure_all(tmp_path, "a test").proof
    assert len(back.steps) == 3 and proof.read_one(tmp_path, GPU | change) == other
    assert proof.read_one(tmp_path, GPU) == back


@pytest.mark.parametrize("change", [{"torch": "2.14.0"}, {"rehearsal": "T4:1"}])
def test_steps_of_another_machine_are_not_gone_on_with(machine, monkeypatch, tmp_path, change):
    gpu_steps.measure_all(tmp_path, "a test")
    monkeypatch.setattr(gpu_steps, "environment", lambda device: GPU | change)
    monkeypatch.setattr(gpu_steps, "_apart", lambda case, *_: None)
    outcome = gpu_steps.measure_all(tmp_path, "a test")
    assert len(outcome.proof.large) == 3 and not outcome.proof.steps


def test_without_time_no_process_starts(monkeypatch):
    monkeypatch.setattr(apart, "run", pytest.fail)
    for left in (gpu_steps.SECONDS - 1, 0, -100):
        with pytest.raises(TimeoutError):
            gpu_steps._apart(CASES[0], time.monotonic() + left, threading.Event(), 1)

"""What a real GPU measured of other people's models, beside what is planned and written of it."""

import copy
import json

import pandas as pd
import pytest

from benchmarks import apart, gpu_models, gpu_models_table, gpu_seconds
from benchmarks.gpu_model_cases import CASES, step_of
from benchmarks.gpu_models_table import KINDS
from tests.night import few_by_day

KEPT = gpu_models_table.read().set_index("step")
BY_DAY = ("BERT-base", "Qwen3-0.6B, fp32", "4 layers of Llama-3.1-8B, compile")


def test_the_page_holds_what_was_measured_and_what_was_planned_before():
    (path,) = gpu_models_table.FOLDER.glob("*.json")
    (kept,) = gpu_models_table.files()
    assert path.name == gpu_models.file_of(kept["environment"]) and not kept["failed"]
    assert json.loads(gpu_models.as_json(kept)) == kept
    assert list(KEPT.index) == list(kept["steps"])
    for step, seen in kept["steps"].items():
        for kind in KINDS:
            row = KEPT.loc[step]
            assert (row[kind], row[f"{kind}, planned before"]) == (seen[kind], seen["before"][kind])


@pytest.mark.parametrize("name", few_by_day(KEPT.index, BY_DAY.__contains__))
def test_a_step_is_planned_as_the_page_says(name):
    """By day steps that all releases plan alike; at night all, with the releases of the page."""
    kept = KEPT.loc[name]
    if name not in BY_DAY and kept["planned with"] != gpu_models_table.releases():
        pytest.skip(f"it was planned with {kept['planned with']}")
    now = gpu_models_table.rows([name]).iloc[0]
    for kind, near in (("allocated", 1e-3), ("reserved", 0.02)):
        assert now[f"{kind}, planned"] == pytest.approx(kept[f"{kind}, planned"], rel=near), (
            f"{name}: write docs/data/gpu-models.csv anew (python -m {gpu_models_table.__name__})"
        )


@pytest.mark.parametrize("table", [gpu_models_table, gpu_seconds])
def test_rows_are_written_with_the_releases_of_the_page_alone(table, monkeypatch):
    monkeypatch.setattr(gpu_models_table, "releases", lambda: "torch 1.0 and transformers 1.0")
    monkeypatch.setattr(table, "rows", None)  # nothing is planned first
    with pytest.raises(ValueError, match=r"measured with torch 2\.11.*has torch 1\.0.*: install"):
        table.main(["--write"])


def test_a_step_that_was_measured_but_never_planned_is_in_both_tables(monkeypatch, tmp_path):
    (kept,) = copy.deepcopy(gpu_models_table.files())
    refused, fine = "BERT-base", "GPT-2 medium"
    kept["steps"] = {name: kept["steps"][name] for name in (refused, fine)}
    kept["steps"][refused]["before"] = {"why": "It had no layers."}
    monkeypatch.setattr(gpu_models_table, "files", lambda: [kept])
    monkeypatch.setattr(gpu_seconds, "GROUPS", (gpu_seconds.OTHERS, gpu_seconds.SINGLE))
    honest = gpu_models.plan_model_step

    def plan_model_step(step):
        if step.config.model_type == "bert":
            raise ValueError("It has no layers.")
        return honest(step)

    monkeypatch.setattr(gpu_models, "plan_model_step", plan_model_step)
    table = gpu_models_table.rows()
    planned = [f"{kind}, {when}" for kind in KINDS for when in ("planned", "planned before")]
    assert table.loc[0, planned].isna().all() and table.loc[1, planned].notna().all()
    monkeypatch.setattr(gpu_models_table, "PAGE", tmp_path / "page.csv")
    monkeypatch.setattr(gpu_models_table, "refuse_other_releases", lambda: None)
    assert gpu_models_table.main(["--write"]) == 0
    assert gpu_models_table.read().isna().sum().sum() == len(planned)
    told = gpu_models_table.sentences()
    assert f"worst: {fine})" in told and told.count("(1 had no plan)") == 2
    both = gpu_models_table.short()
    monkeypatch.setattr(gpu_models_table, "read", lambda: table.iloc[1:])
    assert gpu_models_table.short() == both.replace("(2)", "(1)")
    seconds = gpu_seconds.rows([refused, fine])
    assert pd.isna(seconds["planned"]).tolist() == [True, False]


def test_what_fails_is_kept_and_tried_again_after_the_others(monkeypatch, tmp_path):
    names = ["BERT-base", "Qwen3-0.6B, compile", "T5-base"]
    here = {"device": "cuda", "name": "Tesla T4", "torch": "2.13.0"}
    monkeypatch.setattr(gpu_models, "environment", lambda device: here)
    monkeypatch.setattr(gpu_models, "CASES", {name: CASES[name] for name in names})
    seen, asked = {"allocated": 1, "reserved": 2, "seconds": 0.1, "first": 1.0}, []

    def first_fails(command, *_):
        asked.append(command[-1])
        if command[-1] == names[0]:
            raise RuntimeError("out of\nmemory")
        return seen

    monkeypatch.setattr(apart, "run", first_fails)
    kept = gpu_models.measure_all(tmp_path, "a test", jobs=1)
    assert kept["failed"] == {names[0]: "out of memory"} and asked == [names[0], *names[:0:-1]]
    assert json.loads((tmp_path / gpu_models.file_of(here)).read_text()) == kept
    monkeypatch.setattr(apart, "run", lambda *_: seen)
    again = gpu_models.measure_all(tmp_path, "a test", jobs=1)
    assert not again["failed"] and set(again["steps"]) == set(names)
    assert gpu_models.measure_all(tmp_path, "a test", until=0.0) == again
    assert all(step_of(name).micro_batch for name in CASES)

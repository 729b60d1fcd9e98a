"""What a real GPU measured of other people's models, beside what is planned and written of it."""

import json

import pytest

from benchmarks import gpu_models, gpu_models_table
from benchmarks.gpu_model_cases import CASES, step_of
from tests.night import few_by_day

KEPT = gpu_models_table.read()
NAMES = [row["step"] for row in KEPT]
BY_DAY = ("BERT-base", "Qwen3-0.6B, fp32", "4 layers of Llama-3.1-8B, compile")


def test_every_case_is_a_step():
    for name in CASES:
        assert step_of(name).micro_batch


def test_the_page_holds_what_was_measured_and_what_was_planned_before():
    (kept,) = gpu_models_table.files()
    assert [row["step"] for row in KEPT] == list(kept["steps"])
    for row in KEPT:
        seen = kept["steps"][row["step"]]
        for kind in gpu_models_table.KINDS:
            assert row[kind] == str(seen[kind])
            assert row[f"{kind}, planned before"] == str(seen["before"][kind])


@pytest.mark.parametrize("name", few_by_day(NAMES, BY_DAY.__contains__))
def test_a_step_is_planned_as_the_page_says(name):
    """By day steps that all releases plan alike; at night all, with the releases of the page."""
    (kept,) = [row for row in KEPT if row["step"] == name]
    if name not in BY_DAY and kept["planned with"] != gpu_models_table.releases():
        pytest.skip(f"it was planned with {kept['planned with']}")
    (now,) = gpu_models_table.rows([name])
    for kind, near in (("allocated", 1e-3), ("reserved", 0.02)):
        assert float(now[f"{kind}, planned"]) == pytest.approx(
            float(kept[f"{kind}, planned"]), rel=near
        ), f"{name}: write docs/data/gpu-models.csv anew (python -m {gpu_models_table.__name__})"


def test_a_file_is_named_by_its_machine_and_reads_back():
    (path,) = gpu_models_table.FOLDER.glob("*.json")
    kept = json.loads(path.read_text(encoding="utf8"))
    assert path.name == gpu_models.file_of(kept["environment"])
    assert json.loads(gpu_models.as_json(kept)) == kept and not kept["failed"]

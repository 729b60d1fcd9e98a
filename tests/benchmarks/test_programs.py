"""Programs of other people: what is kept of them, and the command that runs them again."""

import re
from importlib.util import find_spec

import pytest

from benchmarks import published_peaks
from benchmarks.programs import __main__ as command
from benchmarks.programs import table
from tests.small import ROOT

ENTRIES = table.read()["programs"]


def test_each_program_names_its_version_and_every_difference_has_a_cause():
    assert len({(entry["path"], entry["arguments"]) for entry in ENTRIES}) == len(ENTRIES) >= 12
    for entry in ENTRIES:
        assert re.fullmatch(r"v\d+\.\d+\.\d+|[0-9a-f]{7}", entry["version"])
        assert re.fullmatch(r"[0-9a-f]{64}", entry["sha256"])
        assert min(entry["planned"]) > 100_000 and len(entry["real"]) == command.STEPS - 1
        table.reason(entry)
    assert sum(table.beside(entry) == 0 for entry in ENTRIES) >= 9


@pytest.mark.skipif(find_spec("tokenizers") is None, reason="tokenizers is not installed")
def test_examples_have_one_length_under_both_tokenizers(tmp_path):
    """So that the order in which a run shuffles them does not change its memory."""
    from transformers import AutoTokenizer

    from benchmarks.programs import inputs

    inputs.write(tmp_path)
    lines = (tmp_path / "validation.txt").read_text().splitlines()
    for name in ("bert-base-cased", "Qwen/Qwen2-0.5B", "HuggingFaceTB/SmolLM-360M"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        lengths = {len(tokenizer(line)["input_ids"]) for line in lines}
        assert len(lengths) == 1 and lengths.pop() >= 40


PAGE = (ROOT / "docs" / "checked-programs.md").read_text(encoding="utf8")


@pytest.mark.parametrize(
    "mark, made", [("programs", table.markdown), ("published", table.published)]
)
def test_the_page_shows_what_is_kept(mark, made):
    shown = PAGE.split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0]
    assert shown.strip() == made().strip()


def test_a_published_measurement_is_planned_within_two_per_cent():
    facts = table.read()["published"]
    assert re.fullmatch(r"[0-9a-f]{64}", facts["sha256"]) and len(facts["cases"]) == 6
    measured = {point.name: point.allocated for point in published_peaks.STEPS}
    for case in facts["cases"]:
        assert abs(table.miss(case)) < 0.02 and case["measured"] in measured.values()

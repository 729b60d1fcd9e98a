"""README says what the code says."""

import re
from dataclasses import replace as with_

from PIL import Image

from helpers import record, tables
from helpers.plan import plan
from helpers.strategy import techniques
from tests.small import a_run
from tools.course import readme, trust

TEXT = readme.README.read_text(encoding="utf8")


def test_the_tables_are_fresh():
    # The block on trust has a test of its own: tests/benchmarks/test_published_peaks.py.
    assert readme.fill(TEXT, but="trust") == TEXT, "README.md is stale: run `make readme`"


def test_the_kept_plans_of_the_notebooks_table_are_fresh_and_it_marks_its_rows():
    assert techniques.rows() == techniques.rows(plan), "stale: run `make plans`"
    marked = techniques.table("precision").frame.set_index("technique")[""]
    assert {name for name, mark in marked.items() if mark} == {
        "mixed precision, fp16",
        "mixed precision, bf16",
    }


def test_the_picture_shows_todays_plan():
    with Image.open(readme.PICTURE) as picture:
        assert picture.info["Description"] == readme.digest(), (
            "docs/plan.png is stale: run `make readme`"
        )


def test_records_change_what_it_says_of_trust(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert "no run from a GPU" in trust.of_records()
    for label, planned in (("before", 98), ("after", 104)):
        run = a_run(f"00_small/{label}")
        gpu = with_(
            run,
            plan=run.plan | {"peak": 90, "allocated": planned, "reserved": 110},
            environment={"device": "cuda", "name": "Card X"},
            memory=run.memory | {"allocated": 100, "reserved": 120, "device": 200},
        )
        (tmp_path / f"00_small.{label}.card-x.json").write_text(gpu.to_json())
    assert "104 bytes" in str(tables.runs({"after": gpu})), (
        "planned beside measured, both of the allocator"
    )
    text = trust.of_records()
    assert "by 3.0% in the mean and by +4.0% at worst (00_small/after, Card X)" in text
    row = ("00_small/after", "vit, mini", "Card X", "104 bytes", "100 bytes", "+4.0%")
    row += ("110 bytes", "120 bytes")
    assert re.search(r" +\| ".join(map(re.escape, row)), text)
    assert "Card X: after 100 bytes (plan +4.0%)" in readme.recorded("00_small")

"""README says what the code says."""

import re
from dataclasses import replace as with_

import pytest
from PIL import Image

from helpers import record, show, sweeps
from tests.small import a_run
from tight_fit.command import main as command
from tools.course import blocks, readme, trust

TEXT = readme.README.read_text(encoding="utf8")
SCREENS = 900  # words of README, tables and the command's answer included: one and a half


DEAR = "layouts.md"  # its layouts are planned anew
PAGES = [
    pytest.param(page, marks=pytest.mark.night if page.name == DEAR else (), id=page.name)
    for page in readme.PAGES
]


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_are_fresh(page):
    text = page.read_text(encoding="utf8")
    for name in readme.PAGES[page]:
        assert f"<!-- {name} -->\n" in text and f"\n<!-- /{name} -->" in text
    assert readme.filled(page) == text, f"{page.name} is stale: run `make readme`"


def test_readme_has_an_answer_a_lesson_and_two_tables_on_a_screen_and_a_half():
    assert len(TEXT.split()) <= SCREENS
    assert TEXT.count("![") == 2 and len(re.findall(r"^\| ---", TEXT, re.M)) == 2
    assert "none yet" not in TEXT
    for reader in ("I am out of memory", "I want to learn", "I teach"):
        assert reader in TEXT


def test_the_answer_in_readme_is_the_commands(capsys):
    name, gpu = blocks.ASKED
    assert command.main([name, "--gpu", gpu]) == 1
    said = capsys.readouterr().out.splitlines()
    shown = blocks.answer().splitlines()[2:-1]
    assert len(shown) > 6
    assert all(line in said for line in shown if line != "...")


def test_the_accuracy_in_readme_is_the_sweeps():
    table = sweeps.table("03_freezing").frame.set_index("arm")["difference"]
    told = blocks._accuracy(("03_freezing", "lower half frozen"))
    assert told.replace(" points", "") == table["lower half frozen"]
    with pytest.raises(FileNotFoundError):
        blocks._accuracy(("99_none", "an arm"))


def test_the_notebooks_table_marks_its_rows():
    marked = show.techniques("precision").frame.set_index("technique")[""]
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
    assert trust.of_records() == trust.NO_RECORDS
    for label, planned in (("before", 98), ("after", 104)):
        run = a_run(f"00_small/{label}")
        gpu = with_(
            run,
            plan=run.plan | {"peak": 90, "allocated": planned, "reserved": 110},
            environment={"device": "cuda", "name": "Card X"},
            memory=run.memory | {"allocated": 100, "reserved": 120, "device": 200},
        )
        (tmp_path / f"00_small.{label}.card-x.json").write_text(gpu.to_json())
    text = trust.of_records()
    assert "by 3.0% in the mean and by +4.0% at worst (00_small/after, Card X)" in text
    row = ("00_small/after", "vit, mini", "Card X", "104 bytes", "100 bytes", "+4.0%")
    row += ("110 bytes", "120 bytes")
    assert re.search(r" +\| ".join(map(re.escape, row)), text)
    assert "Card X: after 100 bytes (plan +4.0%)" in blocks.recorded("00_small")

"""Grading: points, the CSV file, and which exercises count. tests/attack has hostile notebooks."""

import csv
import re

import pytest

from tests.small import submission
from tools.course import NOTEBOOKS, ROOT, grade, sandbox
from tools.course.__main__ import main


def test_each_exercise_counts_for_itself(tmp_path, capsys):
    path = submission(
        tmp_path / "a" / "15_a_student.ipynb",
        "answer = -1\ncheck('15.1', answer)",
        'answer = None\ncheck("15.4", answer)',
        "1 / 0",
        "def stuck(first, second):\n"
        "    return len(first) != len(second) or any(x == y for x, y in zip(first, second))\n"
        "check('15.3', stuck)",
        "check('03.1', 1)",
    )
    assert main(["grade", str(path), "--csv", str(tmp_path / "grades.csv")]) == 0
    printed = capsys.readouterr()
    assert "1 of 4 points" in printed.out and printed.err == ""
    with (tmp_path / "grades.csv").open(newline="") as file:
        found = {row["exercise"]: row for row in csv.DictReader(file)}
    points = {number: row["points"] for number, row in found.items()}
    assert points == {"15.1": "0", "15.2": "0", "15.4": "0", "15.3": "1"}
    assert "has the wrong sign" in found["15.1"]["said"]
    assert found["15.2"]["said"] == "no check of it was called."
    assert found["15.4"]["said"] == "not answered yet."


@pytest.mark.parametrize(
    "name, cells, handed, chapter",
    [
        ("02_x.ipynb", ["check('03.1', 1)"], ["03.1"], "02"),
        ("mine.ipynb", ["check('03.1', 1)"], [], "03"),
        ("mine.ipynb", [], ["03.1", "03.2", "02.1"], "03"),
        ("2024.ipynb", ["check(number='04.1', answer=1)"], [], "04"),
        ("99.ipynb", [], ["05.1"], "05"),
        ("mine.ipynb", ["x = 1"], [], None),
    ],
)
def test_the_exercises_that_count_are_those_of_one_chapter(tmp_path, name, cells, handed, chapter):
    counted = grade.of_its_chapter(tmp_path / name, cells, handed)
    assert {number[:2] for number in counted} == ({chapter} if chapter else set())
    assert counted == sorted(counted) and len(counted) >= (2 if chapter else 0)


def test_a_lesson_and_its_lab_count_what_they_ask_and_what_was_handed_in():
    lessons = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    for path in lessons:
        lab = NOTEBOOKS / "labs" / f"{path.stem}_lab.ipynb"
        both = [grade.of_its_chapter(file, [], []) for file in (path, lab)]
        whole = [number for number in grade.load_all() if number[:2] == path.name[:2]]
        assert sorted(both[0] + (both[1] if lab.is_file() else [])) == whole
        assert grade.of_its_chapter(path, [], whole) == whole


def test_what_notebooks_read_is_copied_for_them():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"}
    for path in NOTEBOOKS.rglob("[0-9][0-9]_*.ipynb"):
        code = "\n".join(grade.code_cells(path, path.name))
        for folder in folders - {"notebooks", *sandbox.COPIED}:
            named = rf"^(?:from|import) {folder}\b|[\"']{folder}/|/ [\"']{folder}[\"']"
            assert not re.search(named, code, re.M), f"{path.name} reads {folder}/"
    assert all((ROOT / name).exists() for name in sandbox.COPIED)

"""Grading: right, wrong, missing, broken and deleted answers of a student's notebook."""

import csv

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tools.course.__main__ import main
from tools.course.grade import grade

HEAD = "import sys\nsys.path.insert(0, '..')\nfrom exercises.check import check"


def notebook(folder, *cells):
    path = folder / "a_student.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in (HEAD, *cells)]), path)
    return path


def test_each_exercise_counts_for_itself(tmp_path, capsys):
    path = notebook(
        tmp_path,
        "answer = -1\ncheck('02.1', answer)",
        'answer = None\ncheck("02.2", answer)',
        "1 / 0",
        "from tests.exercises.solutions import nb02\n"
        "function = nb02.RIGHT['02.4']\ncheck('02.4', function)",
    )
    found = {one.exercise: one for one in grade(path)}
    assert {number: one.points for number, one in found.items()} == {
        "02.1": 0,
        "02.2": 0,
        "02.3": 0,
        "02.4": 1,
    }
    assert "not yet" in found["02.1"].said and "not answered yet" in found["02.2"].said
    assert found["02.3"].said == "no cell checks it"
    assert main(["grade", str(path), "--csv", str(tmp_path / "grades.csv")]) == 0
    assert "1 of 4 points" in capsys.readouterr().out
    with (tmp_path / "grades.csv").open(newline="") as file:
        assert [row["points"] for row in csv.DictReader(file)] == ["0", "0", "0", "1"]


@pytest.mark.parametrize(
    "cells, says", [((), "checks no exercise"), (None, "cannot be read as a notebook")]
)
def test_what_is_no_students_notebook(tmp_path, capsys, cells, says):
    path = tmp_path / "a_student.ipynb"
    path.write_text("{}") if cells is None else notebook(tmp_path, *cells)
    assert main(["grade", str(path)]) == 1
    assert says in capsys.readouterr().err

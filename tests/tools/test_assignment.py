"""Lessons as assignments of nbgrader: each exercise an answer to fill in and a locked check.

With nbgrader 0.9.6 itself such a notebook gave a point for a right answer, and none for a wrong or
a missing one.
"""

import nbformat
import pytest

from tools.course.assignment import BEGIN, END, assignment, write
from tools.course.notebooks import chosen, every_notebook


def graded(notebook):
    return [cell for cell in notebook.cells if "nbgrader" in cell.metadata]


@pytest.mark.parametrize("path", every_notebook(), ids=lambda path: path.stem)
def test_every_exercise_becomes_an_answer_and_a_check(path):
    before = nbformat.read(path, as_version=4)
    asked = [line for cell in before.cells if cell.cell_type == "code" for line in
             cell.source.split("\n") if line.startswith("check(")]  # fmt: skip
    made = assignment(before)
    cells = graded(made)
    answers, checks = cells[::2], cells[1::2]
    assert [cell.source.split("\n")[-1] for cell in checks] == asked
    for answer, check in zip(answers, checks, strict=True):
        facts, others = answer.metadata.nbgrader, check.metadata.nbgrader
        assert facts.solution and not facts.grade and not facts.locked
        assert others.grade and others.locked and others.points == 1 and not others.solution
        compile(answer.source, "answer", "exec")
        assert answer.source.count(BEGIN) == answer.source.count(END) == 1
        assert "check(" not in answer.source
    assert len({cell.metadata.nbgrader.grade_id for cell in cells}) == len(cells)
    assert not any(cell.get("outputs") for cell in made.cells)
    nbformat.validate(made)


def test_a_check_raises_for_a_missing_answer(monkeypatch):
    monkeypatch.setenv("TIGHT_FIT_GRADE", "0")  # is set by the cell, and taken back afterwards
    from exercises.check import check

    cells = graded(assignment(nbformat.read(chosen(["02"])[0], as_version=4)))
    names = {"check": check}
    exec(cells[0].source, names)
    with pytest.raises(AssertionError):
        exec(cells[1].source, names)


def test_an_assignment_that_is_there_is_kept(tmp_path):
    [path] = write(chosen(["00"]), tmp_path / "source" / "week1")
    path.write_text("a solution")
    with pytest.raises(FileExistsError, match="is there already: name another folder"):
        write(chosen(["00"]), path.parent)
    assert path.read_text() == "a solution"

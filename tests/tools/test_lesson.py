"""`make lesson`: stubs of a new lesson, which fail until they are written."""

import nbformat
import pytest

from exercises.check import REGISTRY
from tests.lessons import rules
from tools.course import lesson


def test_stubs_are_whole_and_fail_where_something_is_to_be_written(tmp_path):
    paths = lesson.write("97", "Eight bits", root=tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "notebooks/97_eight_bits.ipynb",
        "notebooks/labs/97_eight_bits_lab.ipynb",
        "exercises/nb97.py",
        "tests/exercises/solutions/nb97.py",
    ]
    notebook = nbformat.read(paths[0], as_version=4)
    nbformat.validate(notebook)
    faults = {rule.__name__ for rule in rules.RULES if rule(notebook)}
    assert faults == {"schematic", "in_your_own_code", "references"}
    exec(paths[2].read_text(), {"__name__": "exercises.nb97"})
    for number in ("97.1", "97.2", "97.3"):
        with pytest.raises(AssertionError, match=lesson.STILL):
            REGISTRY.pop(number).test(None)


@pytest.mark.parametrize(
    ("number", "title", "says"),
    [("6", "Eight bits", "two digits"), ("", "Eight bits", "two digits"), ("97", "", "TITLE"),
     ("97", 'a "quoted" one', "plain characters"), ("97", "x" * 61, "60")],
)  # fmt: skip
def test_what_is_no_lesson_is_one_sentence(tmp_path, number, title, says):
    with pytest.raises(ValueError, match=says):
        lesson.write(number, title, root=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_number_that_is_taken_is_left_as_it_is(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "97_other.ipynb").write_text("{}")
    with pytest.raises(FileExistsError, match="choose another number"):
        lesson.write("97", "Eight bits", root=tmp_path)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["97_other.ipynb"]

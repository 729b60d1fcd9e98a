"""The room of exercises, and every exercise: right answers pass, wrong ones fail with a sentence.

The answers are in tests/exercises/solutions/nbNN.py, a file per notebook: RIGHT has the right
answer of each exercise, and WRONG a list of wrong ones, of which two or more must be refused by
the exercise's own assertions.
"""

import functools
import importlib
import json
import linecache
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from exercises import check as room
from exercises.check import check, exercise, load_all
from exercises.comparisons import agree, close, same
from tests.small import ROOT, python

EXERCISES = load_all()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
CALL = re.compile(r"""\bcheck\(\s*["'](\d\d\.\d+)["']""")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(room, "_tries", {})
    monkeypatch.delenv("TIGHT_FIT_GRADE", raising=False)


@pytest.fixture
def double(monkeypatch):
    """An exercise 98.1: give a function that doubles."""
    monkeypatch.setattr(room, "REGISTRY", {})

    @exercise("98.1", hints=["Add it to itself.", "Use 2 * x"], why="Twice is more than once")
    def _(answer):
        agree(answer, lambda x: 2 * x, examples=[(2,)], draw=lambda rng: (rng.randint(3, 99),))


# -- the verdicts ----------------------------------------------------------------------------------


def body_is_pass(x):
    pass


def body_is_return(x):
    return


def decorated(function):
    return function


@decorated
@decorated
def returns_none(x):
    """A decorated function begins on the line of its first decorator."""
    return None


@functools.lru_cache  # what it gives is an object that can be called, and an answer
def cached(x): ...


def raises(x):
    raise NotImplementedError


def generates(x):
    return
    yield


async def awaits(x):
    pass


class Doubles:
    def __call__(self, x): ...

    def method(self, x): ...


# fmt: off
SAME_NAMES = (lambda x: None, lambda x: 2 * x)
OTHER_NAMES = (lambda x: None, lambda y: 2 * y)
OTHER_LINES = (
    lambda x:
        None,
)
# fmt: on
MISSING = (
    None,
    ...,
    body_is_pass,
    body_is_return,
    returns_none,
    Doubles().method,
    Doubles.method,
    OTHER_NAMES[0],
    OTHER_LINES[0],
)  # fmt: skip
ANSWERS = (
    raises, generates, awaits, cached, functools.partial(body_is_pass, 2), Doubles(), Doubles,
    print, [].append, OTHER_NAMES[1], SAME_NAMES[1],
    SAME_NAMES[0],  # the rule cannot tell it from its neighbour, and takes it for an answer
    False, 0, "", torch.zeros(2),
)  # fmt: skip


def test_what_is_an_answer_and_what_is_none(double, capsys):
    for answer in MISSING:
        assert check("98.1", answer).passed is None, answer
    assert capsys.readouterr().out == len(MISSING) * "Exercise 98.1: not answered yet.\n"
    assert [answer for answer in ANSWERS if room._is_missing(answer)] == []


def test_a_function_whose_source_cannot_be_read_is_an_answer(tmp_path, monkeypatch):
    names = {}
    exec("def empty(): pass", names)
    assert not room._is_missing(names["empty"])
    path = tmp_path / "changing.py"
    path.write_text("def pending(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    pending = importlib.import_module("changing").pending
    assert room._is_missing(pending)
    path.write_text("def pending(: syntax error, and one more line\n\n")
    linecache.checkcache()
    assert not room._is_missing(pending)


def test_in_a_notebook_functions_have_a_source_and_a_check_shows_its_line_alone(double, capsys):
    shell = InteractiveShell()
    cells = (
        "%pwd\nfrom exercises.check import check\ndef empty(x):\n    ...\ncheck('98.1', empty)",
        "def full(x):\n    y = %pwd\n    return 2 * x\ncheck('98.1', full)",
    )
    for cell in cells:
        assert shell.run_cell(cell, store_history=True).success
    said = "Exercise 98.1: not answered yet.\nExercise 98.1: right. Twice is more than once.\n"
    assert re.sub(r"Out\[\d\]: ", "", capsys.readouterr().out) == said  # no result is shown


def test_hints_grow_with_wrong_tries_and_start_again_after_a_right_one(double, capsys):
    for answer in (*[lambda x: x * x] * 3, lambda x: x + x, 4):
        check("98.1", answer)
    lines = capsys.readouterr().out.splitlines()
    for line, hint in zip(lines, ("Add it to itself.", "Use 2 * x.", "Use 2 * x.")):
        assert re.fullmatch(r"Exercise 98\.1: not yet: what your function gives for .*", line)
        assert line.endswith(f". Hint: {hint}")
    assert lines[3:] == [
        "Exercise 98.1: right. Twice is more than once.",
        "Exercise 98.1: not yet: your answer should be a function, and is 4. "
        "Hint: Add it to itself.",
    ]


def fails(x):
    raise AssertionError


def shouts(x):
    raise RuntimeError("one\ntwo " + "x" * 1000)


def test_a_wrong_answer_gets_one_sentence(double, capsys):
    for answer, said in (
        (lambda x: 1 / 0, "your answer raised ZeroDivisionError: division by zero."),
        (lambda: 3, "your answer raised TypeError: "),
        (shouts, "your answer raised RuntimeError: one two x"),
        (fails, "an assertion in your answer failed."),
        (lambda x: print(end=""), "gives for (2) is nothing: does it return its result?"),
        (lambda x: 5, "what your function gives for (2), 5, is too large"),
        (lambda x: str(2 * x), "should be a number, and is '4'."),
    ):
        result = check("98.1", answer)
        assert result.passed is False and said in result.sentence
        assert result.sentence.endswith((".", "?")) and len(result.sentence) <= 301
        assert len(capsys.readouterr().out.splitlines()) == 1


def test_strict_mode_raises_for_a_teacher(double, monkeypatch):
    monkeypatch.setenv("TIGHT_FIT_GRADE", "1")
    for answer, said in (
        (None, r"98\.1: not answered yet\."),
        (lambda x: x, r"98\.1: not yet: .* Hint: Add"),
        (lambda x: x / 0, "ZeroDivisionError"),
    ):
        with pytest.raises(AssertionError, match=said):
            check("98.1", answer)
    assert check("98.1", lambda x: 2 * x).passed is True
    monkeypatch.setenv("TIGHT_FIT_GRADE", "0")
    assert check("98.1", None).passed is None


def test_a_check_leaves_the_random_numbers_alone(double):
    drawn = []
    exercise("98.2", hints=["a", "b"], why="c")(lambda answer: drawn.append(torch.rand(1).item()))
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = torch.rand(1)
    check("98.2", 1), check("98.2", 1)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected) and drawn[0] == drawn[1]


# -- the registry ----------------------------------------------------------------------------------


def test_an_exercise_that_does_not_exist_is_named(double):
    for number in ("2.1", "02", "02.0", "02.1a", "", 2.1, None):
        with pytest.raises(ValueError, match="is no exercise: give a string"):
            check(number, 1)
    with pytest.raises(ValueError, match=r"There is no exercise 98\.7: notebook 98 has 98\.1\."):
        check("98.7", 1)
    with pytest.raises(ValueError, match=r"There is no exercise 97\.1: notebook 97 has none\."):
        check("97.1", 1)


def test_a_careless_registration_is_refused(double):
    for hints, why in (([], "x"), (["one"], "x"), ("ab", "x"), (["a", ""], "x"), (["a", "b"], "")):
        with pytest.raises(ValueError, match="two or more hints"):
            exercise("98.3", hints=hints, why=why)

    def register(number, test):
        return exercise(number, hints=["a", "b"], why="c")(test)

    with pytest.raises(ValueError, match="registered twice"):
        register("98.1", fails)
    stray = type(fails)(fails.__code__, {"__name__": "exercises.nb02"})
    with pytest.raises(ValueError, match=r"98\.4 belongs in exercises\.nb98, not in nb02"):
        register("98.4", stray)
    register("98.5", lambda answer: answer == 3)
    with pytest.raises(TypeError, match="must assert, and return nothing"):
        check("98.5", 3)


def test_modules_are_loaded_by_number_and_their_own_errors_are_not_hidden(
    double, tmp_path, monkeypatch
):
    (tmp_path / "nb96.py").write_text(
        "from exercises.check import exercise\nfrom exercises.comparisons import close\n"
        "@exercise('96.1', hints=['a', 'b'], why='c')\n"
        "def _(answer):\n    close(answer, 3)\n"
    )
    (tmp_path / "nb95.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.setattr(room.exercises, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "exercises.nb96", raising=False)
    assert check("96.1", 3).passed and not check("96.1", 4).passed
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        check("95.1", 3)


def test_without_assertions_nothing_passes():
    code = (
        "from exercises import check\nfrom exercises.check import exercise\n"
        "@exercise('98.1', hints=['a', 'b'], why='c')\ndef _(answer): assert answer == 1\n"
        "check.check('98.1', 2)"
    )
    done = python("-O", "-c", code, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1 and "run Python without -O" in done.stderr


# -- the comparisons -------------------------------------------------------------------------------


def test_close_takes_numbers_of_any_kind():
    for answer in (9.4, 9.45, np.float32(9.4), np.array(9.4), torch.tensor([9.4])):
        close(answer, 9.4, rel=0.01, unit="GiB")
    close(0, 0, rel=0)
    close(16, 16, rel=0)


@pytest.mark.parametrize(
    "answer, said",
    [(8.0, "8 GiB, is too small"), (12, "12 GiB, is too large"),
     (940, "too large by more than ten times"), (0.02, "too small by more than ten times"),
     (9.4 * 2**30, "looks like bytes"), (9.4 * 1024, "looks like MiB"),
     (9.4 * 2**30 / 1e9, "looks like GB"), (-9.4, "has the wrong sign"),
     (float("inf"), "no finite number"), ("9.4", "should be a number in GiB, and is '9.4'"),
     (True, "should be a number"), ([9.4], "should be a number"),
     (torch.ones(2), "is a tensor of shape")],
)  # fmt: skip
def test_close_says_what_is_wrong_and_not_the_truth(answer, said):
    with pytest.raises(AssertionError) as caught:
        close(answer, 9.4, rel=0.01, unit="GiB")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "right, wrong, said",
    [(torch.ones(2, 3), torch.ones(3, 2), "shape (3, 2) and not (2, 3)"),
     (torch.ones(2), [1, 1], "should be a tensor"),
     (torch.ones(2), torch.tensor([1, 1.5]), "off by up to 0.5"),
     (torch.ones(2), torch.ones(2) / 0, "NaN or infinity"),
     (np.ones(2), np.zeros(2), "off by up"), ([1, (2, 3)], [1, (2, 4)], "item 1 of item 1"),
     ((1, 2), [1], "1 items and not 2"), ([1], 1, "should be a list"),
     ({"a": 1}, {"b": 1}, "should have the keys a"),
     ({"a": 1}, {"a": 2}, "'a' of your answer, 2, is too large"),
     ("bf16", "fp16", "is 'fp16', which is not right"), (True, False, "is False"),
     (3, 3.01, "too large"), (0, 1, "too large"), (0, 1e-3, "too large")],
)  # fmt: skip
def test_same(right, wrong, said):
    same(right, right)
    with pytest.raises(AssertionError) as caught:
        same(wrong, right)
    assert said in str(caught.value)


def test_agree_gives_each_side_its_own_arguments_and_meets_new_ones():
    def draw(rng):
        return (torch.tensor([rng.random(), rng.random()]),)

    examples = [(torch.tensor([1.0, 2.0]),)]
    agree(lambda x: x.mul_(2), lambda x: x.mul_(2), examples, draw)
    assert examples[0][0].tolist() == [1.0, 2.0]
    with pytest.raises(AssertionError, match=r"\(a tensor of shape \(2,\)\) has the right shape"):
        agree(lambda x: torch.tensor([2.0, 4.0]), lambda x: x * 2, examples, draw)  # hard-coded
    with pytest.raises(ValueError, match="a constant would pass"):
        agree(lambda x: 1, lambda x: 1, [(1,)], lambda rng: (rng.random(),))
    with pytest.raises(TypeError, match="tuples"):
        agree(lambda x: 1, lambda x: 1, [3], draw)


# -- every exercise of the course ------------------------------------------------------------------


def solutions(number: str):
    """tests/exercises/solutions/nbNN.py: RIGHT = {number: answer}, WRONG = {number: [answers]}."""
    return importlib.import_module(f"tests.exercises.solutions.nb{number[:2]}")


@pytest.mark.parametrize("number", EXERCISES)
def test_the_right_answer_passes_and_none_is_not_answered(number, capsys):
    assert check(number, None).passed is None
    result = check(number, solutions(number).RIGHT[number])
    assert result.passed is True, result.sentence
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("number", EXERCISES)
def test_wrong_answers_fail_each_with_a_sentence(number):
    wrong = solutions(number).WRONG[number]
    results = [check(number, answer) for answer in wrong]
    assert [result.passed for result in results] == [False] * len(wrong)
    told = [result.sentence for result in results if result.error is None]
    assert len(told) >= 2, (
        f"Exercise {number} needs two wrong answers that its own assertions refuse."
    )
    for sentence in told:
        assert len(sentence.split()) >= 4 and "\n" not in sentence, sentence
        assert "an assertion in your answer failed" not in sentence, (
            f"{number} asserts without a sentence."
        )


@pytest.mark.parametrize(
    "number, answer",
    [("05.3", "b, d"), ("06.1", 4.0), ("06.2", 1.28), ("09.1", 0.62), ("10.3", ["d", "e"])],
)
def test_what_means_the_same_is_right_too(number, answer):
    result = check(number, answer)
    assert result.passed is True, result.sentence


def test_every_exercise_has_its_notebook_and_solutions_hold_no_other():
    for chapter in {number[:2] for number in EXERCISES}:
        assert [path for path in NOTEBOOKS if path.name[:2] == chapter], f"nb{chapter}: no notebook"
        numbers = {number for number in EXERCISES if number[:2] == chapter}
        answers = solutions(chapter)
        assert answers.RIGHT.keys() == answers.WRONG.keys() == numbers, chapter


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_lesson_and_its_lab_ask_the_exercises_once_each_and_leave_them_open(path):
    lab = path.parent / "labs" / f"{path.stem}_lab.ipynb"
    asked = []
    for file in filter(Path.is_file, (path, lab)):
        for cell in json.loads(file.read_text(encoding="utf8"))["cells"]:
            for number in CALL.findall("".join(cell["source"]) * (cell["cell_type"] == "code")):
                asked.append(number)
                printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
                assert f"Exercise {number}: not answered yet." in printed
    assert sorted(asked) == [number for number in EXERCISES if number[:2] == path.name[:2]]
    assert 3 <= len(asked) <= 4

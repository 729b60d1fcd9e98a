"""Answers that leave a process: as plain values, or as functions that are called where they are."""

import json
import math
import os
import random
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from exercises.check import load_all, verdict
from exercises.encoding import Unreadable, decode, encode
from exercises.handout import Broken, HandedFunction, receive, send
from helpers.recipe import Recipe
from tests.exercises import FULL_SIZE
from tests.night import few_by_day
from tests.small import python
from tight_fit.layouts.layout import Layout
from tools.course import sandbox
from tools.course.judge import Judge

ROOT = Path(__file__).parents[2]
VALUES = [
    *(None, True, False, 0, -1, 2**200, 1.5, math.inf, -0.0, "", "×\ud800", ..., 1 + 2j),
    *([], [1, [2.0, (3,)]], (1,), {1, "a"}, frozenset({(1, 2)}), {"a": {1: [None]}}),
    *(Recipe(accumulation=4), Layout(data=2, strategy="zero1")),
]


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value, []))), lambda place: print)


# By number: the order in which a set prints its values differs from process to process.
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_value_comes_back_as_it_was(value):
    back = there_and_back(value)
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int64", "bool", "uint8", "complex64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_a_tensor_comes_back_bit_for_bit(dtype, shape):
    tensor = (torch.randn(shape) * 9).to(getattr(torch, dtype))
    back = there_and_back(tensor.requires_grad_(tensor.is_floating_point()))
    assert back.dtype == tensor.dtype and torch.equal(back, tensor) and not back.requires_grad


def test_arrays_scalars_and_iterators():
    for value in (np.float16(1.5), np.int64(3), np.arange(6.0).reshape(2, 3)[:, ::2]):
        back = there_and_back(value)
        assert back.dtype == value.dtype and np.array_equal(back, value)
        assert type(back) is type(value)
    assert list(there_and_back(index * 2 for index in range(3))) == [0, 2, 4]
    assert not isinstance(there_and_back(range(3)), list)


def test_what_has_no_form_is_unreadable_and_right_for_nothing():
    class Always:
        def __eq__(self, other):
            return True

        def __float__(self):
            return 1.75

    class Number(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert isinstance(there_and_back(Always()), Unreadable)
    assert there_and_back(Number(3)) != 4 and type(there_and_back(Number(3))) is int
    exercise = load_all()["02.1"]
    assert verdict(exercise, there_and_back(Always())).passed is False
    deep = []
    for _ in range(1000):
        deep = [deep]
    assert "Unreadable" in str(type(there_and_back(deep)[0])) or there_and_back(deep)


def test_a_function_is_called_where_it_is_and_writes_into_its_arguments():
    ours, theirs = socket.socketpair()

    def work():
        from exercises.handout import served

        while True:
            try:
                send(theirs, served(receive(theirs), [change]))
            except Broken:
                return

    def change(tensor, items):
        tensor.add_(1)
        items.append(3)
        if len(items) > 3:
            raise KeyError("four")
        return [lambda: 7, tensor.sum()]

    thread = threading.Thread(target=work)
    thread.start()
    function, tensor, items = HandedFunction(ours, 0), torch.zeros(2), [1]
    given = function(tensor, items)
    assert tensor.tolist() == [1, 1] and items == [1, 3] and given[1] == 2
    function(tensor, items)
    with pytest.raises(KeyError, match="four"):
        function(tensor, items)
    ours.close()
    theirs.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    with pytest.raises((Broken, OSError)):
        function(tensor, items)


# These exercises plan full-size models: about 10 to 30 seconds each.
STUDENT = """
import importlib, random, sys
from exercises.check import check
for number in sys.argv[2:]:
    solutions = importlib.import_module(f"tests.exercises.solutions.nb{number[:2]}")
    wanted = sys.argv[1]
    if wanted == "right":
        check(number, solutions.RIGHT[number])
    else:
        check(number, solutions.WRONG[number][int(wanted) % len(solutions.WRONG[number])])
"""


@pytest.mark.parametrize(
    "wanted, each", few_by_day([("right", 4), ("right", 1), ("0", 9), ("0", 3)])
)
def test_solutions_are_judged_from_another_process_as_in_this_one(wanted, each, tmp_path):
    """Every exercise but those that plan full-size models, whose answers are plain values; of
    wrong answers a third, as they travel in the same way. By day a few of both."""
    numbers = [number for number in load_all() if number not in FULL_SIZE]
    random.Random(0).shuffle(numbers)
    numbers = numbers[::each]
    with sandbox.copy_of_project() as folder:
        judge = Judge(folder / "exercises" / "handout.sock")
        (folder / "tests").symlink_to(ROOT / "tests")
        process = python(
            "-c", STUDENT, wanted, *numbers, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )  # fmt: skip
        judge.close()
    assert process.returncode == 0, process.stderr
    found = judge.results()
    assert found.keys() == set(numbers)
    passed = {number: found[number].passed for number in numbers}
    others = {number: found[number] for number in numbers if passed[number] != (wanted == "right")}
    assert not others

"""Answers that leave a process: as plain values, or as functions that are called where they are."""

import json
import math
import os
import random
import socket
import threading

import numpy as np
import pytest
import torch

from exercises.check import load_all, verdict
from exercises.encoding import Unreadable, decode, encode
from exercises.handout import Broken, HandedFunction, receive, send, served
from helpers.recipe import Recipe
from tests.exercises import FULL_SIZE
from tests.small import ROOT, python
from tight_fit.layouts.layout import Layout
from tools.course import sandbox
from tools.course.judge import Judge

VALUES = [
    *(None, True, False, -1, 2**200, 1.5, math.inf, -0.0, "×\ud800", ..., 1 + 2j),
    *([1, [2.0, (3,)]], {1, "a"}, frozenset({(1, 2)}), {"a": {1: [None]}}),
    *(Recipe(accumulation=4), Layout(data=2, strategy="zero1")),
]


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value, []))), lambda place: print)


def test_a_value_comes_back_as_it_was():
    for value in VALUES:
        back = there_and_back(value)
        assert back == value and type(back) is type(value)
    for value in (np.float16(1.5), np.int64(3), np.arange(6.0).reshape(2, 3)[:, ::2]):
        back = there_and_back(value)
        assert back.dtype == value.dtype and np.array_equal(back, value)
        assert type(back) is type(value)
    assert list(there_and_back(index * 2 for index in range(3))) == [0, 2, 4]
    assert not isinstance(there_and_back(range(3)), list)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int64", "bool", "uint8", "complex64"])
def test_a_tensor_comes_back_bit_for_bit(dtype):
    for shape in ((), (3,), (2, 0), (2, 3)):
        tensor = (torch.randn(shape) * 9).to(getattr(torch, dtype))
        back = there_and_back(tensor.requires_grad_(tensor.is_floating_point()))
        assert back.dtype == tensor.dtype and torch.equal(back, tensor) and not back.requires_grad


def test_what_has_no_form_is_unreadable_and_right_for_nothing():
    class Always:
        def __eq__(self, other):
            return True

        def __float__(self):
            return 1.75

    class Number(int):
        __eq__, __hash__ = Always.__eq__, int.__hash__

    assert isinstance(there_and_back(Always()), Unreadable)
    assert there_and_back(Number(3)) != 4 and type(there_and_back(Number(3))) is int
    assert verdict(load_all()["02.1"], there_and_back(Always())).passed is False
    deep = []
    for _ in range(1000):
        deep = [deep]
    found = there_and_back(deep)
    while isinstance(found, list):
        (found,) = found
    assert isinstance(found, Unreadable)


def test_a_function_is_called_where_it_is_and_writes_into_its_arguments():
    ours, theirs = socket.socketpair()

    def change(tensor, items):
        tensor.add_(1)
        items.append(3)
        if len(items) > 3:
            raise KeyError("four")
        return [lambda: 7, tensor.sum()]

    def work():
        for _ in range(3):
            send(theirs, served(receive(theirs), [change]))
        theirs.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=work)
    thread.start()
    function, tensor, items = HandedFunction(ours, 0), torch.zeros(2), [1]
    given = function(tensor, items)
    assert tensor.tolist() == [1, 1] and items == [1, 3] and given[1] == 2
    function(tensor, items)
    with pytest.raises(KeyError, match="four"):
        function(tensor, items)
    thread.join(10)
    with pytest.raises((Broken, OSError)):
        function(tensor, items)


STUDENT = """
import importlib, sys
from exercises.check import check
for place, number in enumerate(sys.argv[1:]):
    solutions = importlib.import_module(f"tests.exercises.solutions.nb{number[:2]}")
    wrong = solutions.WRONG[number]
    check(number, wrong[place % len(wrong)] if place % 4 == 0 else solutions.RIGHT[number])
"""


def test_solutions_are_judged_from_another_process_as_in_this_one():
    """Of every exercise but those that plan full-size models one answer, each fourth a wrong one,
    which travel in the same way."""
    numbers = [number for number in load_all() if number not in FULL_SIZE]
    random.Random(0).shuffle(numbers)
    with sandbox.copy_of_project() as folder:
        judge = Judge(folder / "exercises" / "handout.sock")
        (folder / "tests").symlink_to(ROOT / "tests")
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        process = python("-c", STUDENT, *numbers, cwd=folder, env=environment)
        judge.close()
    assert process.returncode == 0, process.stderr
    passed = {number: found.passed for number, found in judge.results().items()}
    assert passed == {number: place % 4 != 0 for place, number in enumerate(numbers)}

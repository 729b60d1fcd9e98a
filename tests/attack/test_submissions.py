"""Submissions: odd tags and names, tables of grades, unusual answers, forged messages."""

import base64
import json
import socket
import threading
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from exercises.check import load, verdict
from exercises.encoding import decode, encode
from exercises.handout import MOST_PARTS, Broken, receive, send
from tests.attack import refused
from tests.small import HEAD, submission
from tools.course import grade, submissions
from tools.course.judge import Judge

RIGHT = "check('02.1', 1.75)"


# -- notebooks that are not what they seem; a class of such files is in test_grading.py


def test_names_of_files_say_the_chapter_only_where_they_begin_with_it(tmp_path):
    for name, handed, counted in (
        ("17-11 anna.ipynb", ["02.1"], ["02.1", "02.2", "02.3"]),
        ("02_gradient_accumulation_lab (1).ipynb", [], ["02.4"]),
    ):
        assert grade.of_its_chapter(tmp_path / name, [], handed) == counted


@pytest.mark.parametrize("given", ["02.ipynb", "02.IPYNB", "new.ipynb", "linked.csv"])
def test_grades_replace_no_notebook(given, tmp_path, monkeypatch):
    path = submission(tmp_path / "02.ipynb", RIGHT)
    before = path.read_bytes()
    (tmp_path / "linked.csv").symlink_to(path)
    monkeypatch.setattr(grade, "grade", None)
    refused(ValueError, ["is a notebook", ".csv"], lambda: grade.command([path], tmp_path / given))
    assert path.read_bytes() == before and not (tmp_path / "new.ipynb").exists()


def test_an_exercise_that_is_named_twice_counts_once(tmp_path):
    path = submission(tmp_path / "02.ipynb", RIGHT)
    grades, _ = grade.grade(path, numbers=("02.1", "02.1"))
    assert [one.points for one in grades] == [1]


@pytest.mark.parametrize("tags", [None, [], [None], ["a"]])
def test_odd_tags_and_many_outputs_cost_no_points(tags, tmp_path):
    path = submission(tmp_path / "02.ipynb", RIGHT)
    values = json.loads(path.read_text())
    values["cells"][1]["metadata"] = {"tags": tags}
    values["cells"][1]["outputs"] = [[{"a": 1}]] * 100_000 + [{"output_type": 3}]
    path.write_text(json.dumps(values))
    assert submissions.code_cells(path, "x") == [HEAD, RIGHT]


# -- machines


def test_a_folder_of_temporary_files_with_a_long_path_is_one_sentence(tmp_path):
    (tmp_path / ("x" * 99)).mkdir()
    refused(OSError, "set TMPDIR", lambda: Judge(tmp_path / ("x" * 99) / "handout.sock"))


# -- answers that are right, in another form than the usual one

FORMS = {
    "02.1": (Fraction(7, 4), Decimal("1.75"), np.float16(1.75), torch.tensor(1.75), np.array(1.75)),
    "13.3": (np.longdouble(3), np.int64(3), 3, torch.tensor(3, dtype=torch.int8), Fraction(3)),
    "08.4": (np.int64(200), np.uint8(200), torch.tensor(200), np.array(200)),
    "06.1": (np.int32(4), torch.tensor(4)),
    "11.1": (np.int64(8), torch.tensor(8)),
    "10.3": ({np.str_("D"), "E"}, np.array(["D", "E"]).tolist(), ("E", "D")),
}


@pytest.mark.parametrize(
    "number, answer",
    [(number, form) for number, forms in FORMS.items() for form in forms],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_a_right_answer_is_right_in_the_notebook_and_where_it_is_graded(number, answer):
    sent = decode(json.loads(json.dumps(encode(answer, []))), lambda place: None)
    for one in (answer, sent):
        found = verdict(load(number), one)
        assert found.passed, found.sentence


# -- messages to the judge that no `check` sends

DATA = base64.b64encode(bytes(4)).decode()
TENSOR = {"kind": "tensor", "dtype": "float32", "shape": [1], "data": DATA}
ARRAY = {"kind": "array", "dtype": "<f4", "shape": [1], "data": DATA}
FORGED = {
    "a tensor of 2^64 elements": {**TENSOR, "shape": [2**62, 4, 0], "data": ""},
    "a tensor of 10^30": {**TENSOR, "shape": [10**30, 0], "data": ""},
    "a tensor of a hundred dimensions": {**TENSOR, "shape": [1] * 100},
    "an array of a hundred dimensions": {**ARRAY, "shape": [1] * 100},
    **{
        f"the dtype {text!r:.12}": {**ARRAY, "dtype": text}
        for text in ("(1,", ",", "{", "f4\0", "f" * 10**5, "\ud800", "(1000000000)f4", "O", "S0")
    },
    "a dtype that is a list": {**ARRAY, "dtype": [["a", "f4"]]},
    "a shape that is a text": {**ARRAY, "shape": "11", "data": ""},
    "a shape that is an object": {**ARRAY, "shape": {"a": 1}},
    "data that are a number": {**ARRAY, "data": 7},
    "data that are no base 64": {**ARRAY, "data": "ä"},
    "a kind that is a list": {"kind": []},
    "no kind": {},
    "a set of lists": {"kind": "set", "items": [[1]]},
    "a dict of three": {"kind": "dict", "items": [[1, 2, 3]]},
    "a complex number of texts": {"kind": "complex", "parts": ["x", 1]},
    "a recipe of lists": {"kind": "record", "type": "Recipe", "fields": {"model": [1]}},
    "a recipe of other fields": {"kind": "record", "type": "Recipe", "fields": {"__class__": 1}},
    "a record of another class": {"kind": "record", "type": "Path", "fields": {}},
    "a function at infinity": {"kind": "function", "place": float("inf")},
    "a function at a text": {"kind": "function", "place": "1" * 5000},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_forged_answer_is_worth_nothing_and_the_next_one_counts(forged, tmp_path, monkeypatch):
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    judge = Judge(tmp_path / "handout.sock")
    for number, answer in (("02.1", forged), ("13.3", 3.0)):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(tmp_path / "handout.sock"))
            send(connection, {"number": number, "missing": False, "answer": answer})
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    judge.close()
    found = judge.results()
    assert not died and found["13.3"].passed and not (found.get("02.1") and found["02.1"].passed)


@pytest.mark.parametrize("part", ["[]", "1", '{"kind":0}'])
def test_an_answer_of_millions_of_values_is_not_read(part):
    text = b'{"answer": [' + b",".join([part.encode()] * (MOST_PARTS + 1)) + b"]}"
    ours, theirs = socket.socketpair()
    sending = threading.Thread(
        target=lambda: ours.sendall(len(text).to_bytes(8, "big") + text), daemon=True
    )
    sending.start()
    refused(Broken, "1,000,000 values", lambda: receive(theirs))
    sending.join()
    refused(ValueError, "1,000,000 values", lambda: send(ours, {"a": [0] * (MOST_PARTS + 1)}))
    ours.close()
    theirs.close()

"""Submissions: links, lost folders, copies, neighbours' files, unusual answers, forged messages."""

import base64
import csv
import json
import shutil
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
from tests.attack import one_sentence, refused
from tests.small import HEAD, submission
from tight_fit.command.wrapper import sentence
from tools.course import grade, sandbox, submissions
from tools.course.__main__ import main
from tools.course.judge import Judge

RIGHT = "check('02.1', 1.75)"


# -- a class whose files are not what they seem


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """{file or folder: its rows} of one class."""
    folder = tmp_path_factory.mktemp("class")
    bob = submission(folder / "bob" / "02.ipynb", RIGHT)
    for student in ("linked", "dangling", "round", "renamed", "other_suffix"):
        (folder / student).mkdir()
    (folder / "linked" / "02.ipynb").symlink_to("../bob/02.ipynb")
    (folder / "dangling" / "02.ipynb").symlink_to("gone.ipynb")
    (folder / "round" / "02.ipynb").symlink_to("02.ipynb")
    (folder / "linked_folder").symlink_to("bob")
    (folder / "renamed" / "02.ipynb.txt").write_bytes(bob.read_bytes())
    (folder / "other_suffix" / "02.IPYNB").write_bytes(bob.read_bytes())
    submission(folder / "dated" / "17-11 anna.ipynb", RIGHT)
    submission(folder / "a_copy" / "02_gradient_accumulation_lab (1).ipynb", "check('02.4', None)")
    reads = (
        f"import json\nfor cell in json.load(open({str(bob)!r}))['cells']:\n"
        "    exec(cell['source'] if isinstance(cell['source'], str) else ''.join(cell['source']))"
    )
    submission(folder / "reads_a_neighbour" / "02.ipynb", reads)
    submission(folder / "a_fraction" / "02.ipynb", "from fractions import Fraction",
          "check('02.1', Fraction(7, 4))")  # fmt: skip
    to = folder.parent / "grades.csv"
    assert main(["grade", str(folder), "--csv", str(to), "--seconds", "120"]) == 1
    rows: dict[str, list[dict[str, str]]] = {}
    with to.open(newline="", encoding="utf8") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["file"].partition("/")[0], []).append(row)
    return rows


def points(rows):
    return {row["exercise"]: int(row["points"]) for row in rows}


@pytest.mark.parametrize(
    "student, says",
    [
        ("linked", "is a link to another file"),
        ("dangling", "is a link to another file"),
        ("round", "is a link to another file"),
        ("linked_folder", "is a link to a folder"),
        ("renamed", "holds no notebook"),
    ],
)
def test_a_file_of_others_gives_no_points_and_a_lost_one_is_said(student, says, graded):
    (row,) = graded[student]
    assert row["points"] == "0" and row["exercise"] == grade.NO_EXERCISE
    one_sentence(row["said"], student, says)


def test_a_suffix_in_capitals_is_a_notebook(graded):
    assert points(graded["other_suffix"])["02.1"] == 1


def test_a_date_in_a_name_is_no_chapter(graded):
    assert points(graded["dated"]) == {"02.1": 1, "02.2": 0, "02.3": 0}


def test_a_copy_of_a_lab_is_a_lab(graded):
    assert points(graded["a_copy"]) == {"02.4": 0}


@pytest.mark.skipif(not sandbox.separate(), reason="this machine allows no namespaces")
def test_a_neighbour_s_file_cannot_be_run(graded):
    assert sum(points(graded["reads_a_neighbour"]).values()) == 0


def test_a_fraction_is_a_number_as_it_is_in_the_notebook(graded):
    assert points(graded["a_fraction"])["02.1"] == 1


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


def test_a_notebook_of_many_outputs_is_read_without_them(tmp_path):
    path = submission(tmp_path / "02.ipynb", RIGHT)
    values = json.loads(path.read_text())
    values["cells"][1]["outputs"] = [[{"a": 1}]] * 100_000 + [{"output_type": 3}]
    path.write_text(json.dumps(values))
    assert submissions.code_cells(path, "x") == [HEAD, RIGHT]


@pytest.mark.parametrize("tags", [None, [], [None], ["a"]])
def test_odd_tags_cost_no_points(tags, tmp_path):
    path = submission(tmp_path / "02.ipynb", RIGHT)
    values = json.loads(path.read_text())
    values["cells"][1]["metadata"] = {"tags": tags}
    path.write_text(json.dumps(values))
    assert submissions.code_cells(path, "x") == [HEAD, RIGHT]


# -- machines


def test_a_folder_of_temporary_files_with_a_long_path_is_one_sentence(tmp_path):
    (tmp_path / ("x" * 99)).mkdir()
    refused(OSError, "set TMPDIR", lambda: Judge(tmp_path / ("x" * 99) / "handout.sock"))


def test_a_full_disk_of_temporary_files_is_one_sentence():
    why = "[Errno 28] No space left on device: 'a' -> '/tmp/b'"
    many = shutil.Error([("a", "/tmp/b", why)] * 900)
    one_sentence(sentence(many), "/tmp/b cannot be written", "no space left")


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

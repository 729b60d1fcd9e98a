"""Grading a class: hostile and broken notebooks, damaged files, links, forged answers."""

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.attack import one_sentence, refused
from tests.isolation import with_mark
from tests.small import python, submission
from tools.course import ROOT, grade, sandbox
from tools.course.__main__ import main
from tools.course.sandbox import Limits

MOMENTA = "def momenta(m, k):\n    return [m / k / (1 - m * (k - j) / k) for j in range(1, k + 1)]"
COUNTED = ("02.1", "02.4", "13.3", "15.1")  # right: 1.75, momenta, 3.0, 63
FORGERS = """
import importlib, exercises.check, exercises.comparisons, exercises.handout
nothing = lambda *a, **k: None
for module in (exercises.check, exercises.comparisons, exercises.handout):
    for name in ('close', 'same', 'agree', 'verdict', 'exercise', '_is_missing', 'observe'):
        setattr(module, name, nothing)
exercises.check.REGISTRY.clear()
"""
REWRITER = """
import exercises
for name in ('check', 'comparisons', 'handout', 'nb02', 'nb13', 'nb15'):
    for folder in (os.path.dirname(exercises.__file__), TEACHERS):
        try:
            with open(f'{folder}/{name}.py', 'w') as file:
                file.write('def check(*a, **k):\\n    print(1)\\n')
        except OSError:
            pass
""".replace("TEACHERS", repr(str(ROOT / "exercises")))
SOCKET = """
import socket, json
def message(text):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect('../exercises/handout.sock')
        connection.sendall(len(text).to_bytes(8, 'big') + text)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(100)
for text in (b'', b'[]', b'{"number": []}', b'{' * 100000, b'\\xff', b'[' * 100000):
    message(text)
message(json.dumps({'number': '02.1', 'missing': False, 'answer': {'kind': 'right'}}).encode())
message(json.dumps({'number': '13.3', 'passed': True, 'points': 9}).encode())
"""

# {student: (cells after HEAD, points of COUNTED)}
HONEST = {
    "in_every_form": (
        ["result = check(number='02.1', answer=1.75)\nprint(result)",
         "import exercises.check as c\ndef hand_in(**more):\n    return c.check(**more)\n"
         "hand_in(number='15.1', answer=63)",
         MOMENTA, "for number, it in {'02.4': momenta, '13.3': 3.0}.items(): check(number, it)"],
        "1111",
    ),
    "then_an_error": (
        ["check('02.1', 1.75); check('13.3', 3); 1 / 0", "check('15.1', 63)"], "1011",
    ),
    "wrong_then_right": (
        ["check('02.1', 1)", "check('02.1', 1.75)", "check('02.1', None)"], "1000",
    ),
    "from_a_child": (
        ["if os.fork() == 0:\n    check('15.1', 63)\n    os._exit(0)\nos.wait()"], "0001",
    ),
    "with_await": (["async def f():\n    check('15.1', 63)\nawait f()"], "0001"),
    "leaves_early": (["check('02.1', 1.75)\nsys.exit()", "check('15.1', 63)"], "1001"),
    "wrong": (
        ["check('02.1', 2)", "check('02.4', lambda m, k: [0] * k)",
         "try:\n    check('15.1', 64)\nexcept AssertionError:\n    pass"],
        "0000",
    ),
}  # fmt: skip
HOSTILE = {
    "blinds_check": (["check = lambda *a: None\ncheck('02.1', 1.75)"], "0000"),
    "in_a_string": (["'''\ncheck('02.1', 1.75)\n'''\nif False:\n    check('15.1', 63)"], "0000"),
    "environment": (
        ["os.environ['TIGHT_FIT_GRADE'] = '0'\nos.environ.clear()",
         "check('02.1', 9)\ncheck('15.1', 63)"],
        "0001",
    ),
    "patches_modules": ([FORGERS, "check('02.1', 9); check('13.3', 3.0)"], "0010"),
    "forgets_modules": (
        ["for name in [*sys.modules]:\n    if 'exercises' in name:\n        del sys.modules[name]",
         "check('02.1', 9); check('15.1', 63)"],
        "0001",
    ),
    "rewrites_files": ([REWRITER, "check('02.1', 9); check('15.1', 63)"], "0001"),
    "writes_to_the_socket": ([SOCKET, "check('15.1', 63)"], "0001"),
    "equals_everything": (
        ["class Yes(float):\n    __eq__ = __le__ = lambda *a: True\ncheck('02.1', Yes(9))"],
        "0000",
    ),
    "patches_when_called": (
        [f"def f(m, k):\n    exec({FORGERS!r})\n    return [0.0] * k\ncheck('02.4', f)"], "0000",
    ),
    "raises_everything": (
        ["def f(m, k):\n    raise SystemExit(0)\ncheck('02.4', f)", "check('15.1', 63)"], "0001",
    ),
    "tries_every_number": (["for n in range(100):\n    check('15.1', n)"], "0000"),
    "prints_50_mb": (["for _ in range(50):\n    print('x' * 10**6)", "check('15.1', 63)"], "0001"),
    "takes_memory": (["x = [bytearray(2**28) for _ in range(9)]", "check('15.1', 63)"], "0001"),
    "sends_too_much": (
        ["import numpy\ncheck('02.1', numpy.zeros(2**23))", "check('15.1', 63)"], "0001",
    ),
    "nests_deeply": (
        ["x = []\nfor _ in range(10**5):\n    x = [x]\ncheck('02.1', x)", "check('15.1', 63)"],
        "0001",
    ),
    "leaves_children": (
        ["import subprocess\nsubprocess.Popen(['setsid', 'sleep', '7654.3'])",
         "check('15.1', 63)"],
        "0001",
    ),
    "dies": (
        ["check('15.1', 63)", "import ctypes\nctypes.string_at(0)", "check('02.1', 1.75)"], "0001",
    ),
    "ends_itself": (["check('15.1', 63)\nos._exit(0)", "check('02.1', 1.75)"], "0001"),
    "checks_nothing": (["x = 1"], "0000"),
    "unknown": (["check('99.1', 3)"], "0000"),
}  # fmt: skip
FILES = {
    "damaged": (b'{"cells": [', "is damaged"),
    "empty": (b"", "is damaged"),
    "utf16": ('{"cells": []}'.encode("utf-16"), "UTF-16"),
    "latin1": ('{"é": 1}'.encode("latin-1"), "not in UTF-8"),
    "no_notebook": (b"[1, 2]", "cannot be read as a notebook"),
    "deep": (b"[" * 10**5, "cannot be read as a notebook"),
}


NO_FILES = {
    **dict.fromkeys(("linked", "dangling", "round"), "is a link to another file"),
    "linked_folder": "is a link to a folder",
    "renamed": "holds no notebook",
    **{name: says for name, (_, says) in FILES.items()},
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """(rows of the CSV by student, what was printed) of one class of all the notebooks above."""
    folder = tmp_path_factory.mktemp("class")
    for student, (cells, _) in {**HONEST, **HOSTILE}.items():
        submission(folder / student / "02.ipynb", *cells)
    for student, (content, _) in FILES.items():
        (folder / student).mkdir()
        (folder / student / "02.ipynb").write_bytes(content)
    submission(folder / "=1+1" / "02.ipynb", "check('15.1', 63)")
    for student in ("linked", "dangling", "round", "renamed", "other_suffix"):
        (folder / student).mkdir()
    right = folder / "in_every_form" / "02.ipynb"
    (folder / "linked" / "02.ipynb").symlink_to(right)
    (folder / "dangling" / "02.ipynb").symlink_to("gone.ipynb")
    (folder / "round" / "02.ipynb").symlink_to("02.ipynb")
    (folder / "linked_folder").symlink_to("in_every_form")
    (folder / "renamed" / "02.ipynb.txt").write_bytes(right.read_bytes())
    (folder / "other_suffix" / "02.IPYNB").write_bytes(right.read_bytes())
    before = {path: path.read_bytes() for path in (ROOT / "exercises").glob("*.py")}
    to = folder / "grades.csv"
    arguments = [str(folder), "--csv", str(to), "--memory", "1", "--exercises", *COUNTED]
    done = python("-m", "tools.course", "grade", *arguments)
    assert done.returncode == 1, done.stderr
    assert before == {path: path.read_bytes() for path in (ROOT / "exercises").glob("*.py")}
    rows: dict[str, list[dict[str, str]]] = {}
    with to.open(newline="", encoding="utf8") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["file"].partition("/")[0], []).append(row)
    return rows, done.stdout, done.stderr


@pytest.mark.parametrize("student", [*HONEST, *HOSTILE, "other_suffix"])
def test_every_student_gets_the_points_of_right_answers_and_no_other(graded, student):
    points = "".join(row["points"] for row in graded[0][student])
    wanted = {**HONEST, **HOSTILE, "other_suffix": HONEST["in_every_form"]}
    assert points == wanted[student][1], graded[0][student]


@pytest.mark.parametrize("student", NO_FILES)
def test_what_is_no_file_of_a_student_s_is_a_row_that_says_so(graded, student):
    (row,) = graded[0][student]
    one_sentence(row["said"], student, NO_FILES[student])
    assert (row["points"], row["exercise"]) == ("0", grade.NO_EXERCISE)
    assert row["said"] in graded[2]


def test_nothing_is_left_of_a_class_and_what_became_of_the_hostile_is_said(graded):
    rows, printed, errors = graded
    time.sleep(0.2)
    assert not with_mark("7654.3")
    assert "Traceback" not in errors and len(printed) < 50_000
    assert "SIGSEGV in code cell 3" in rows["dies"][0]["said"]
    assert "ended by itself in code cell 2" in rows["ends_itself"][0]["said"]
    assert rows["checks_nothing"][0]["said"] == "no check of it was called."
    assert "There is no exercise 99.1" in errors


def test_no_cell_of_the_table_is_a_formula(graded):
    assert graded[0]["'=1+1"][3]["points"] == "1"
    for value in ("=1", "+1", "-1", "@x", "\tx", "\rx"):
        assert grade.harmless(value)[0] == "'"
    assert grade.harmless("a\x1b[2Jb\n") == "a [2Jb "


def test_what_hangs_is_ended_and_what_it_handed_in_before_counts(tmp_path):
    submission(
        tmp_path / "02.ipynb",
        "check('02.1', 1.75)",
        "import time\ncheck('02.4', lambda m, k: time.sleep(999))",
    )
    limits = Limits(seconds=20)
    grades, problem = grade.grade(tmp_path / "02.ipynb", "x", limits, ("02.1", "02.4"))
    assert [one.points for one in grades] == [1, 0]
    one_sentence(problem, "x was ended after 20 seconds in code cell 3")


@pytest.mark.skipif(not sandbox.separate(), reason="this machine allows no namespaces")
def test_a_submission_sees_no_other_and_writes_nowhere_else(tmp_path):
    submission(tmp_path / "other.ipynb", "x")
    seen = [
        (1, f"import os\nassert not os.listdir({str(tmp_path)!r})"),
        (2, f"open({str(ROOT / 'README.md')!r}, 'a').write('x'); 1 / 0"),
        (3, "assert len([p for p in os.listdir('/proc') if p.isdigit()]) < 5"),
        (4, "assert os.system('mount -o remount,rw /') != 0"),
        (5, "open('here', 'w').close(); open(os.environ['TMPDIR'] + '/x', 'w').close()"),
        (6, "assert not [name for name in os.environ if 'TOKEN' in name]"),
        (7, "assert not os.path.exists('/dev/pts') and not os.listdir('/dev/shm')"),
        (8, "import socket\ntry: socket.create_connection(('192.0.2.1', 80))\n"
            "except OSError as error: assert error.errno == 101, error\nelse: assert False"),
    ]  # fmt: skip
    readme = (ROOT / "README.md").read_bytes()
    with sandbox.copy_of_project() as folder:
        before = sorted(folder.rglob("*"))
        ended = sandbox.run(seen, folder, Limits(seconds=120), [tmp_path])
        assert set(folder.rglob("*")) - set(before) == {folder / "cells.json"}
    assert ended.errors == {2: "ZeroDivisionError: division by zero"}
    assert (ROOT / "README.md").read_bytes() == readme


DEEP = "import os\nfor _ in range(3000):\n    os.mkdir('x')\n    os.chdir('x')"
LIES = (
    "import os\nfor number in range(3, 200):\n"
    "    try: os.write(number, b'%s\\n')\n    except OSError: pass"
)


@pytest.mark.parametrize("alone", [True, False])
def test_a_deep_tree_and_lies_about_progress_end_no_class(alone, tmp_path, monkeypatch):
    """Nor do they change what is graded next."""
    if alone and not sandbox.separate():
        pytest.skip("this machine allows no namespaces")
    monkeypatch.setattr(sandbox, "separate", lambda: alone)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lies = [
        LIES % line
        for line in ('{"cell": Infinity, "error": "x"}', "[" * 9000, '{"cell": [1]}', "null")
    ]
    cells = [*enumerate([*lies, "import shutil; shutil.rmtree('..', True)", DEEP], 1)]
    for _ in range(2):
        with sandbox.copy_of_project() as folder:
            ended = sandbox.run(cells, folder, Limits(seconds=120))
        assert ended.why is None and ended.status == 0 and ended.cell is None, ended
        assert not list(tmp_path.iterdir())


def test_without_namespaces_nothing_is_left_either(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "separate", lambda: False)
    cells = [
        (1, "import subprocess\nsubprocess.Popen(['setsid', '-f', 'sleep', '8765.4'])"),
        (2, "import os\nos.fork() or (os.setsid(), os.execlp('sleep', 'x', '8765.4'))"),
        (3, "import time\ntime.sleep(1)\nos.kill(os.getpid(), 9)"),
    ]
    with sandbox.copy_of_project() as folder:
        ended = sandbox.run(cells, folder, Limits(seconds=120))
    assert ended.status == -9 and ended.cell == 3
    assert not with_mark("8765.4")


def test_a_grader_that_is_killed_leaves_no_process(tmp_path):
    """Its copies of the project are removed when somebody grades again."""
    code = (
        "from tools.course import sandbox\nwith sandbox.copy_of_project() as folder:\n"
        '    sandbox.run([(1, \'import os; os.execlp("sleep", "x", "6543.2")\')], folder,'
        " sandbox.Limits())"
    )
    grader = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    for wanted in (True, False):
        until = time.monotonic() + 60
        while bool(with_mark("6543.2")) != wanted and time.monotonic() < until:
            time.sleep(0.05)
        assert bool(with_mark("6543.2")) == wanted
        grader.kill()
    grader.wait()
    with sandbox.copy_of_project():
        assert not list(Path(tempfile.gettempdir()).glob(f"tight-fit-{grader.pid}-*"))


@pytest.mark.parametrize(
    "limits, cell, why",
    [
        (Limits(seconds=2), "while True: pass", "time"),
        (Limits(processes=9), "for _ in range(12):\n    os.fork() or time.sleep(9)", "processes"),
        (Limits(seconds=60, memory=2**29), "x = [bytearray(2**28)]\nfor it in range(3):\n"
         "    os.fork() or (x.append(bytearray(b'1' * 2**27)), time.sleep(99))", "memory"),
    ],
    ids=["time", "processes", "memory"],
)  # fmt: skip
def test_limits_end_a_submission(limits, cell, why):
    with sandbox.copy_of_project() as folder:
        ended = sandbox.run([(1, f"import os, time\n{cell}\ntime.sleep(99)")], folder, limits)
    assert ended.why is not None and ended.why.startswith(why)
    assert "was ended" in grade.how_it_ended(ended, limits)


def test_two_students_are_told_apart_and_one_file_is_graded_once(tmp_path):
    for student in ("alice", "bob"):
        submission(tmp_path / student / "02.ipynb")
    (tmp_path / "bob" / ".ipynb_checkpoints").mkdir()
    submission(tmp_path / "bob" / ".ipynb_checkpoints" / "02.ipynb")
    named = grade.names([tmp_path, tmp_path / "bob" / "02.ipynb"])
    assert list(named.values()) == ["alice/02.ipynb", "bob/02.ipynb"]


def test_a_cell_that_is_tagged_to_be_skipped_is_skipped(tmp_path):
    cell = new_code_cell("check('02.1', 1.75)", metadata={"tags": ["skip-execution"]})
    nbformat.write(new_notebook(cells=[new_code_cell("x = 1"), cell]), tmp_path / "a.ipynb")
    assert grade.code_cells(tmp_path / "a.ipynb", "a") == ["x = 1"]


def test_exercises_that_do_not_exist_are_refused(tmp_path, capsys):
    assert main(["grade", str(tmp_path / "a.ipynb"), "--exercises", "02.1", "99.1"]) == 1
    one_sentence(capsys.readouterr().err, "There is no exercise 99.1")


def test_without_assertions_nothing_is_graded(tmp_path):
    done = python("-O", "-m", "tools.course", "grade", str(tmp_path / "a.ipynb"))
    assert done.returncode == 1
    one_sentence(done.stderr, "run Python without -O")


def test_what_is_no_file_of_a_students(tmp_path):
    refused(ValueError, "There is no notebook to grade", lambda: grade.names([tmp_path]))
    (tmp_path / "folder.ipynb").mkdir()
    with (tmp_path / "large.ipynb").open("wb") as file:
        file.truncate(101 * 2**20)
    for cells in ([1], [{}], [{"cell_type": "code", "source": 1, "metadata": 3}], 7):
        values = {"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}
        path = tmp_path / f"of {type(cells).__name__} {len(str(cells))}.ipynb"
        path.write_text(json.dumps(values))
    known = {"gone": "no such file", "folder": "no such file", "large": "100 MiB"}
    assert len(found := {"gone", *(path.stem for path in tmp_path.iterdir())}) == 7
    for name in found:
        path = tmp_path / f"{name}.ipynb"
        says = ["name/x", known.get(name, "")]
        refused(ValueError, says, lambda path=path: grade.code_cells(path, "name/x"))

"""The mutants: small errors, each in its span, given to the tests that reach its line."""

import ast
import json
import sys
from types import SimpleNamespace

import pytest

from tools.mutants import operators, reach, run, sample, table

SOURCE = '''"""ä: columns of ast count bytes."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    rows: int = 3


def add(first: int, *, twice=False):
    """2 + 2."""
    if first < 1 and "ü" != "u":
        raise ValueError(f"{first + 1} is too small")
    print(len([1]))
    total = first + (2 if twice else 5)
    return total
'''


def test_every_operator_changes_its_span_to_what_it_says():
    source = SOURCE.encode()
    found = operators.mutants("size.py", source)
    for one in found:
        after = one.apply(source)
        assert after.startswith(source[: one.start]) and after.endswith(source[one.end :])
        assert operators.compiles(after) and after != source
    with pytest.raises(ValueError, match="has changed since"):
        found[0].apply(b"# " + source)
    assert {(one.operator, one.before, one.text.strip("()")) for one in found} == {
        ("off by one", "3", "4"),
        ("boolean", "False", "True"),
        ("branch forced", 'first < 1 and "ü" != "u"', "True"),
        ("branch forced", 'first < 1 and "ü" != "u"', "False"),
        ("and/or", 'first < 1 and "ü" != "u"', "first < 1 or 'ü' != 'u'"),
        ("comparison", "first < 1", "first <= 1"),
        ("comparison", '"ü" != "u"', "'ü' == 'u'"),
        ("off by one", "1", "2"),
        ("statement removed", 'raise ValueError(f"{first + 1} is too small")', "pass"),
        ("arithmetic", "first + (2 if twice else 5)", "first - (2 if twice else 5"),
        ("branch forced", "2 if twice else 5", "2"),
        ("branch forced", "2 if twice else 5", "5"),
        ("off by one", "2", "3"),
        ("off by one", "5", "6"),
        ("return dropped", "return total", "return None"),
    }


def test_marks_tell_which_branch_ran():
    blocks: list = []
    module = reach.marked(SOURCE, "size.py", blocks)
    seen: dict[int, int] = {}
    names = {"__reached__": seen, "__name__": "size"}
    exec(compile(module, "size.py", "exec"), names)
    assert not seen  # importing runs no function
    assert names["add"](4) == 9
    lines = {line for block in seen for a, b in blocks[block][1] for line in range(a, b + 1)}
    assert lines == {12, 14, 15, 16}
    assert ast.get_docstring(module.body[-1]) == "2 + 2."


def written(folder):
    """Two files of tests: a slow test reaches line 3 of a file, and a fixture reaches line 7."""
    blocks = [["helpers/plan/a.py", [[2, 4]]], ["helpers/plan/a.py", [[7, 7]]]]
    (folder / "blocks.json").write_text(json.dumps(blocks))
    rows = [
        {"test": test, "slow": slow, "seconds": 1, "passed": True, "setup": setup, "call": call}
        for test, slow, setup, call in (
            ("tests/plan/x.py::a", True, [], [0]),
            ("tests/plan/x.py::b", False, [1], []),
            ("tests/core/y.py::c", False, [], [0]),
        )
    ]
    (folder / "reached-1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return run.Reached(folder)


@pytest.mark.parametrize(
    "line, tests",
    [
        (3, {"tests/plan/x.py::a", "tests/core/y.py::c"}),
        (7, {"tests/plan/x.py::a", "tests/plan/x.py::b"}),  # a fixture is for its whole file
        (1, {"tests/plan/x.py::a", "tests/plan/x.py::b", "tests/core/y.py::c"}),  # the import
    ],
)
def test_a_mutant_gets_the_tests_that_reach_its_line(tmp_path, line, tests):
    mutant = SimpleNamespace(file="helpers/plan/a.py", line=line)
    reached = written(tmp_path)
    assert reached.of(mutant) == tests
    assert reached.slow == {"tests/plan/x.py::a"}


def tree(folder, right):
    """A repository of one module and a test of it."""
    (folder / "tests").mkdir()
    (folder / "double.py").write_text(f"def double(x):\n    return x + {right}\n")
    (folder / "tests" / "test_double.py").write_text(
        "import time\nfrom double import double\n\n\n"
        "def test_of_nothing():\n    pass\n\n\n"
        "def test_it():\n    assert double(2) == 4\n"
    )
    return folder, ["tests/test_double.py::test_of_nothing", "tests/test_double.py::test_it"]


@pytest.mark.parametrize(
    "right, became",
    [
        ("x", ("passed", "")),
        ("1", ("failed", "tests/test_double.py::test_it")),
        ("(", ("failed", "tests/test_double.py")),  # it cannot be imported
        ("time.sleep(60)", ("does not end", "tests/test_double.py::test_it")),
    ],
)
def test_what_becomes_of_a_mutant(tmp_path, monkeypatch, right, became):
    monkeypatch.setattr(run, "SLOWEST", (10.0, 1.0))
    monkeypatch.setitem(sys.modules, "double", SimpleNamespace(double=lambda x: 4))  # without it
    folder, tests = tree(tmp_path, right)
    if "time" in right:
        (folder / "double.py").write_text("import time\n" + (folder / "double.py").read_text())
    assert run.run(folder, tests, 0.0) == became


def test_the_sample_keeps_what_is_still_there_and_draws_what_is_missing(tmp_path, monkeypatch):
    """And it is the same sample whenever it is drawn."""
    monkeypatch.setattr(sample, "PARTS", {"a": (4, ("a.py",)), "b": (1, ("b.py",))})
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "b.py").write_text("def one():\n    return 1\n")
    first = sample.draw(root=tmp_path)
    rows = [{"part": part} | vars(mutant) for part, mutant in first]
    (tmp_path / "a.py").write_text(f"# moved\n{SOURCE}".replace("2 if twice", "7 if twice"))
    (tmp_path / "b.py").unlink()
    second = sample.draw(rows, root=tmp_path)
    assert second == sample.draw(rows, root=tmp_path)
    there = {one.name for one in operators.mutants("a.py", (tmp_path / "a.py").read_bytes())}
    names = [mutant.name for _, mutant in second]
    assert {one.name for _, one in first} & there <= set(names) <= there
    assert len(set(names)) == len(names) == 4
    for _, mutant in second:
        assert operators.compiles(mutant.apply((tmp_path / "a.py").read_bytes()))


def test_the_page_shows_the_results_that_are_kept():
    page = table.PAGE.read_text(encoding="utf8")
    rows = table.rows()
    equivalent = set(json.loads(table.EQUIVALENT.read_text(encoding="utf8")))
    assert table.table(rows, equivalent) in page
    assert equivalent <= {table.name(row) for row in rows if not row["killed"]}

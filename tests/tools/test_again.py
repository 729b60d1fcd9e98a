"""A test that fails for its neighbours' sake costs a second run, and a real failure stays one."""

import pytest

from tests.again import TESTS_FAILED, run

PASSES = "def test_it():\n    assert True\n"
FAILS = "def test_it():\n    assert False\n"
# Passes only where the file beside it ran in no other test of this process.
DEPENDS = "import sys\n\n\ndef test_it():\n    assert 'test_a' not in sys.modules\n"
BROKEN = "import no_such_module\n"
QUIET = ["-q", "-p", "no:nbval", "-p", "no:hypothesispytest"]


@pytest.mark.parametrize(
    "second, status, said",
    [
        (PASSES, 0, ""),
        (DEPENDS, 0, "test_b.py failed at first, and passed when it ran alone"),
        (FAILS, TESTS_FAILED, "Failed twice: test_b.py"),
        (BROKEN, 2, ""),
    ],
    ids=["passes", "depends on another", "fails", "cannot be read"],
)
def test_what_fails_runs_again_by_itself(second, status, said, tmp_path, capfd):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_a.py").write_text(PASSES)
    (tmp_path / "test_b.py").write_text(second)
    assert run(["test_a.py", "test_b.py"], QUIET, tmp_path) == status
    shown = capfd.readouterr().out
    assert said in shown
    assert ("Again" in shown) == bool(said)


def test_where_much_fails_nothing_runs_again(tmp_path, capfd):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for number in range(21):
        (tmp_path / f"test_{number}.py").write_text(FAILS)
    assert run([], QUIET, tmp_path) == TESTS_FAILED
    assert "Again" not in capfd.readouterr().out


def test_workers_that_collect_different_tests_do_not_run_again(tmp_path, capfd):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    numbered = "import os, pytest\n\n\n@pytest.mark.parametrize('n', [os.getpid()])\n"
    (tmp_path / "test_a.py").write_text(numbered + "def test_it(n):\n    assert n\n")
    assert run(["test_a.py"], [*QUIET, "-n2"], tmp_path) == TESTS_FAILED
    shown = capfd.readouterr().out
    assert "Different tests were collected" in shown and "Again" not in shown

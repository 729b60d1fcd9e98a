"""A test that fails for its neighbours' sake costs a second run, and a real failure stays one."""

import pytest

from tests.again import TESTS_FAILED, run

PASSES = "def test_it():\n    assert True\n"
FAILS = "def test_it():\n    assert False\n"
# Passes only where the file beside it ran in no other test of this process.
DEPENDS = "import sys\n\n\ndef test_it():\n    assert 'test_a' not in sys.modules\n"
QUIET = ["-q", "-p", "no:nbval", "-p", "no:hypothesispytest"]


@pytest.mark.parametrize(
    "second, status, said",
    [
        ({"test_b.py": PASSES}, 0, ""),
        ({"test_b.py": DEPENDS}, 0, "test_b.py failed at first, and passed when it ran alone"),
        ({"test_b.py": FAILS}, TESTS_FAILED, "Failed twice: test_b.py"),
        ({"test_b.py": "import no_such_module\n"}, 2, ""),
        ({f"test_{n}.py": FAILS for n in range(21)}, TESTS_FAILED, ""),  # no neighbour is to blame
    ],
    ids=["passes", "depends on another", "fails", "cannot be read", "much fails"],
)
def test_what_fails_runs_again_by_itself(second, status, said, tmp_path, capfd):
    for name, text in {"pytest.ini": "[pytest]\n", "test_a.py": PASSES, **second}.items():
        (tmp_path / name).write_text(text)
    assert run([], QUIET, tmp_path) == status
    shown = capfd.readouterr().out
    assert said in shown and ("Again" in shown) == bool(said)

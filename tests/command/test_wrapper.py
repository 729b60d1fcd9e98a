"""How a command ends, seen from the shell, and what it imports; faults are in tests/attack."""

import gc
import inspect

import pytest

from tests.small import python
from tight_fit.command.wrapper import importing, run


def raises(error):
    def main():
        raise error

    return main


def test_how_a_command_ends_is_its_status(capsys):
    assert [run(lambda status=status: status, "test") for status in (None, 0, 1, 7)] == [0, 0, 1, 7]
    assert run(raises(BrokenPipeError), "test") == 141 and not capsys.readouterr().err
    assert run(raises(KeyboardInterrupt), "test") == 130
    assert capsys.readouterr().err == "\nInterrupted: what was unfinished is not kept.\n"
    with pytest.raises(ZeroDivisionError):  # a fault of ours keeps its traceback
        run(lambda: 1 // 0, "test")


def test_only_a_process_of_a_commands_own_looks_at_no_import_again():
    """In a notebook's kernel what is frozen would be the reader's own."""

    def imports():
        before = gc.get_freeze_count()
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        return gc.get_freeze_count() - before

    gc.unfreeze()
    try:
        assert imports() <= 0  # what was frozen may go meanwhile
        assert run(lambda: int(imports() < 1000), "name") == 0
        assert imports() <= 0, "only while it runs"
    finally:
        gc.freeze()


def test_libraries_may_look_at_the_stack_while_they_are_imported():
    """PyTorch is told the number of a line alone; who asks for its text gets it."""
    told = inspect.getframeinfo
    with importing():
        assert inspect.getframeinfo(inspect.currentframe()).code_context is None
        assert "inspect.stack()" in inspect.stack()[0].code_context[0]
        assert inspect.getframeinfo(inspect.currentframe(), 1).code_context is not None
    assert inspect.getframeinfo is told


PUT_OFF = """
import sys
from tight_fit.command.wrapper import importing
with importing():
    from transformers.loss.loss_for_object_detection import linear_sum_assignment
assert "scipy.optimize" not in sys.modules
print(*linear_sum_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])[1])
import scipy.optimize
assert scipy.optimize.linear_sum_assignment is not linear_sum_assignment
for name in [name for name in sys.modules if name.startswith("scipy.optimize")]:
    del sys.modules[name]
with importing():
    from scipy.optimize import linear_sum_assignment, minimize_scalar
print(round(minimize_scalar(lambda x: (x - 2) ** 2).x, 6))
"""


def test_the_matching_is_imported_when_it_is_called_and_all_else_at_once():
    done = python("-c", PUT_OFF)
    # by hand: 1 + 2 + 2 is the least of the six sums
    assert done.stdout.split() == ["1", "0", "2", "2.0"], done.stderr

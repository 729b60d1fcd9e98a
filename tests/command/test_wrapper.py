"""How a command ends, seen from the shell that started it; faults are in tests/attack."""

import gc
import inspect

import pytest

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

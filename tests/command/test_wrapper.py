"""How a command ends, seen from the shell that started it."""

import gc

import pytest

from tight_fit.command.wrapper import importing, run, sentence


def test_what_a_command_returns_is_its_status():
    assert [run(lambda status=status: status, "test") for status in (None, 0, 1, 7)] == [0, 0, 1, 7]


@pytest.mark.parametrize(
    "error, status, said",
    [(KeyboardInterrupt, 130, "\nInterrupted: what was unfinished is not kept.\n"),
     (BrokenPipeError, 141, "")],
)  # fmt: skip
def test_an_interrupt_and_a_reader_that_goes_away_are_no_error_of_ours(error, status, said, capsys):
    def main():
        raise error

    assert run(main, "test") == status and capsys.readouterr().err == said


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0, "test")


def test_a_sentence_ends_with_a_full_stop_and_is_one_line():
    assert sentence(ValueError("a\n  b")) == "a b." and sentence(ValueError()) == "ValueError."


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

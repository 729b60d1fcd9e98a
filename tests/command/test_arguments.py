"""Arguments are refused before any work starts, with what would be right."""

import argparse

from tests.attack import refused
from tight_fit.command.arguments import new_file, new_folder


def test_a_file_that_cannot_be_written(tmp_path):
    assert new_file(str(tmp_path / "a.csv")) == tmp_path / "a.csv"
    assert not (tmp_path / "a.csv").exists()
    for typed, says in (
        ("", "empty"),
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "no" / "a.csv"), "there is no folder"),
    ):
        refused(argparse.ArgumentTypeError, says, lambda typed=typed: new_file(typed))


def test_a_folder_that_cannot_be_made(tmp_path):
    assert new_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    (tmp_path / "file").touch()
    for typed, says in (
        (" ", "empty"),
        (str(tmp_path / "file"), "is a file"),
        (str(tmp_path / "file" / "b"), "is a file"),
    ):
        refused(argparse.ArgumentTypeError, says, lambda typed=typed: new_folder(typed))

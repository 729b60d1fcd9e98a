"""Folders for unfinished work, which a killed process leaves behind, and the next one removes."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def unfinished(folder: Path, name: str) -> Iterator[Path]:
    """A new folder `name`-PID-... in `folder`, removed at the end with all that it holds.

    What processes that are no longer there have left under the same name is removed as well.
    """
    for path in folder.glob(f"{name}-*"):
        owner = re.match(rf"{re.escape(name)}-(\d+)-", path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            remove(path)
    made = Path(tempfile.mkdtemp(dir=folder, prefix=f"{name}-{os.getpid()}-"))
    try:
        yield made
    finally:
        remove(made)


def remove(folder: Path) -> None:
    """Remove a folder with all that it holds, however deep: what can be removed of it."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        # What lies two folders below is brought up by one, until nothing is deep any more.
        moved = 0
        while deep := [path for one in _folders(folder) for path in _folders(one)]:
            for path in deep:
                moved += 1
                path.rename(folder / f"{moved}-up")
            for one in _folders(folder):
                if not _folders(one):
                    shutil.rmtree(one, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]

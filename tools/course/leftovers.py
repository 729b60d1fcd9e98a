"""Folders for unfinished work, which a killed process leaves behind, and the next one removes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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
    except RecursionError:  # `rm` goes down without recursion
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)

"""A folder that one run uses at a time, and that can be written to before the run begins."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import filelock

from helpers.storage.state_file import FILE, PREVIOUS, UNFINISHED
from tight_fit.checks import shown
from tight_fit.command.arguments import no_place

LOCK = ".lock"
# Errors of file systems that know no locks, such as some network disks.
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Earlier versions let safetensors write these beside the state, and a kill left them there.
DEBRIS = re.compile(r"\.tmp[A-Za-z0-9]{6}|state\.safetensors\.\d+\.unfinished")


def named(folder: str | Path) -> Path:
    """The path of a folder that the user names. Raises TypeError or ValueError for what is none."""
    if not isinstance(folder, (str, os.PathLike)) or isinstance(os.fspath(folder), bytes):
        raise TypeError(
            f"checkpoint={shown(folder)} must be the path of a folder, or None for none."
        )
    text = os.fspath(folder)
    if not text.strip() or "\0" in text:
        raise ValueError(
            f"checkpoint={shown(text)} names no folder: give one, such as 'runs/first', or None."
        )
    if why := no_place(text):
        raise ValueError(f"checkpoint={shown(text)} {why}.")
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ValueError(
            f"checkpoint={shown(text)} is in a home folder that is not here: write the whole path."
        ) from None


@contextmanager
def held(folder: Path) -> Iterator[str]:
    """Hold a folder for one run: made if necessary, locked, cleared of what killed saves left.

    Gives "" or, where it cannot be written to but has a state to read, the sentence that says so.
    Raises OSError where nothing can be written and nothing be read, RuntimeError where another run
    holds the folder. A kill releases the lock.
    """
    with ExitStack() as stack:
        problem = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"0")
            _lock(folder, stack)
            _clear(folder)
        except OSError as error:
            problem = error.strerror or type(error).__name__
        if problem:
            problem = (
                f"checkpoint={shown(f'{folder}')} cannot be written to ({problem}): choose "
                "a folder that can."
            )
            if not any(os.path.exists(folder / name) for name in (FILE, PREVIOUS)):
                raise OSError(problem)
        yield problem


def too_small(folder: Path, size: int) -> str:
    """ "", or the sentence that says that `size` bytes have no room on the folder's disk."""
    free = shutil.disk_usage(folder).free
    if free >= size:
        return ""
    return (
        f"checkpoint={shown(f'{folder}')} has {free:,} bytes left, and the weights "
        f"alone take {size:,}: free space, or choose another folder."
    )


def _lock(folder: Path, stack: ExitStack) -> None:
    try:
        stack.enter_context(filelock.FileLock(folder / LOCK, timeout=0))
    except filelock.Timeout:
        raise RuntimeError(
            f"Another run is using checkpoint={shown(f'{folder}')}: wait until it ends, or "
            "use another folder."
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        warnings.warn(
            f"{folder} is on a file system without locks, so nothing keeps a second run out of it.",
            stacklevel=4,
        )


def _clear(folder: Path) -> None:
    if (folder / PREVIOUS).is_dir():
        raise OSError(errno.EISDIR, f"{PREVIOUS} is a folder")
    if (folder / UNFINISHED).is_file() or (folder / UNFINISHED).is_symlink():
        (folder / UNFINISHED).unlink()
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    for path in folder.iterdir():
        if DEBRIS.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)

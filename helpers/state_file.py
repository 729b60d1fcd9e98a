"""One state in one file, in a folder that one run uses at a time.

Safetensors, no pickle. A file is written beside the old one and renamed over it, so that a kill at
any moment leaves the old state or the new one. What is read is compared with its digest: a file is
whole, or it is said to be damaged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tight_fit.checks import shown
from tight_fit.command.arguments import no_place

FILE = "state.safetensors"
UNFINISHED = ".unfinished"  # a folder: what a killed save leaves is in it
LOCK = ".lock"
FORMAT = "2"  # the first format had no digest
# Errors of file systems that know no locks, such as some network disks.
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


class State(NamedTuple):
    """What a file holds: `note` is what JSON can say, `tensors` are in CPU memory, by name."""

    note: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE2b (RFC 7693, 16 bytes, in hexadecimal) of a text and of tensors.

    Names, dtypes, shapes and values count; the order of the tensors and their device do not.
    """
    total = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"\0{name} {value.dtype} {tuple(value.shape)}\0".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


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
def held(folder: Path) -> Iterator[None]:
    """Hold a folder for one run: made if necessary, locked, cleared of what killed saves left.

    Raises OSError where nothing can be written, RuntimeError where another run holds the folder. A
    kill releases the lock.
    """
    name = f"checkpoint={shown(f'{folder}')}"
    lock: filelock.BaseFileLock | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise RuntimeError(
            f"Another run is using {name}: wait until it ends, or use another folder."
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise OSError(
                f"{name} cannot be written to ({_cause(error)}): choose a folder that can."
            ) from error
        warnings.warn(
            f"{folder} is on a file system without locks, so nothing keeps a second run out of it.",
            stacklevel=3,
        )
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def check_room(folder: Path, size: int) -> None:
    """Raises OSError where the folder's disk has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(
            f"checkpoint={shown(f'{folder}')} has {free:,} bytes left, and the weights alone take "
            f"{size:,}: free space, or choose another folder."
        )


def write(folder: Path, state: State) -> Path:
    """Write a state to `folder`/state.safetensors, whole or not at all.

    Raises OSError, in one sentence, where the disk is full or read-only: what was there is whole.
    """
    new = folder / UNFINISHED / FILE
    note = json.dumps(state.note, allow_nan=False)
    metadata = {"format": FORMAT, "fine_tune": note, "digest": digest(note, state.tensors)}
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        save_file(state.tensors, new, metadata=metadata)
        with new.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(new, folder / FILE)
    except (OSError, SafetensorError) as error:
        kept = peek(folder).get("step")
        safe = f"the state of step {kept} there is whole" if kept else "no state was there before"
        raise OSError(
            f"The state could not be saved in {folder} ({_cause(error)}); {safe}: free space, or "
            "use another folder, and run again."
        ) from error
    finally:
        shutil.rmtree(new.parent, ignore_errors=True)
    return folder / FILE


def read(folder: Path) -> State | None:
    """The state in a folder, None where there is none.

    Raises ValueError, in one sentence, for a file that is damaged or has another format, OSError
    for one that cannot be read now, and may be whole.
    """
    path = folder / FILE
    if not os.path.lexists(path):  # a link to a disk that is not there is no new start
        return None
    damaged = f"{FILE} in {folder} is not a saved fine-tune or is damaged"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(
            f"{damaged} ({_cause(error)}): delete it, and the run starts again."
        ) from error
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"{path} cannot be read now ({_cause(error)}), and may be whole: keep it, and run "
            "again when this is mended."
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{FILE} in {folder} has format {metadata.get('format', 'none')[:20]!r}, and this "
            f"version reads format {FORMAT}: use the version that saved it, or delete it and start "
            "again."
        )
    if digest(metadata.get("fine_tune", ""), tensors) != metadata.get("digest"):
        raise ValueError(
            f"{damaged} (its content does not match its digest): delete it, and the run starts "
            "again."
        )
    return State(json.loads(metadata["fine_tune"]), tensors)


def peek(folder: Path) -> dict[str, Any]:
    """The note of the state in a folder, unproven; {} where none can be read."""
    try:
        with safe_open(folder / FILE, "pt") as file:
            return dict(json.loads(file.metadata()["fine_tune"]))
    except (SafetensorError, OSError, RuntimeError, TypeError, KeyError, ValueError):
        return {}


def _cause(error: Exception) -> str:
    """What an error of the system or of safetensors says, in one line without paths."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return said.partition(" at path ")[0].partition(" (os error ")[0][:120]

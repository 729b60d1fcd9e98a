"""One state in one file, in a folder that one run uses at a time.

Safetensors, no pickle. A file is written beside the old one and renamed over it, so that a kill at
any moment leaves the old state or the new one. The state before the last one is kept as well, and
everything that is read is compared with its digest: a file is whole, or it is said to be damaged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tight_fit.checks import shown
from tight_fit.command.arguments import no_place

FILE = "state.safetensors"
PREVIOUS = "previous.safetensors"
UNFINISHED = ".unfinished"  # a folder: what a killed save leaves is in it
# What the system says of files that may be whole: no right to read them, no memory, a lost disk.
PASSING = {errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
PASSING |= {errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN, errno.EBUSY}
FORMAT = "2"  # the first format had no digest
LOCK = ".lock"
# Errors of file systems that know no locks, such as some network disks.
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Earlier versions let safetensors write these beside the state, and a kill left them there.
DEBRIS = re.compile(r"\.tmp[A-Za-z0-9]{6}|state\.safetensors\.\d+\.unfinished")
INFINITE = "not finite"  # the key of what JSON has no number for


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


def write(folder: Path, state: State) -> Path:
    """Write a state to `folder`/state.safetensors; the one that was there becomes the previous one.

    Raises OSError, in one sentence, where the disk is full or read-only: what was there is whole.
    """
    file, previous = folder / FILE, folder / PREVIOUS
    new = folder / UNFINISHED / f"{os.getpid()}.safetensors"
    note = json.dumps(state.note, allow_nan=False)
    metadata = {"format": FORMAT, "fine_tune": note, "digest": digest(note, state.tensors)}
    try:
        new.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            previous.unlink(missing_ok=True)  # never are there three states on the disk
        save_file(state.tensors, new, metadata=metadata)
        with new.open("rb") as written:
            os.fsync(written.fileno())
        if file.exists():
            _keep(file, previous)
        os.replace(new, file)
    except (OSError, SafetensorError) as error:
        kept = step_in(folder)
        safe = f"the state of step {kept} there is whole" if kept else "no state was there before"
        raise OSError(
            f"The state could not be saved in {folder} ({_cause(error)}); {safe}: free space, or "
            "use another folder, and run again."
        ) from error
    finally:
        shutil.rmtree(new.parent, ignore_errors=True)
    return file


def _keep(file: Path, previous: Path) -> None:
    """Give the file a second name, so that it stays when the first name goes to another."""
    try:
        os.link(file, previous)
    except OSError:  # a file system without hard links; `read` takes the previous one if need be
        os.replace(file, previous)


def read(folder: Path) -> State | None:
    """The newest state in a folder, None where there is none.

    Raises ValueError, in one sentence, for a file that is damaged or has another format. It says
    whether an older state is whole. Raises OSError for one that cannot be read now, and may be
    whole.
    """
    there = [folder / name for name in (FILE, PREVIOUS) if _is_there(folder / name)]
    if not there:
        return None
    try:
        return _read(there[0])
    except _NotWhole as why:
        older = "the run starts again, as no older state is there"
        for path in there[1:]:
            try:
                note = _read(path).note
                older = (
                    f"the run goes on from the whole state of step {note['step']} in {path.name}"
                )
            except OSError:
                older = f"{path.name} cannot be read now"
            except (_NotWhole, KeyError, TypeError):
                older = f"delete {path.name}, which is damaged as well, and the run starts again"
        raise ValueError(
            f"{there[0].name} in {folder} is not a saved fine-tune or is damaged ({why}): "
            f"delete it, and {older}."
        ) from None


def peek(folder: Path) -> dict[str, Any] | None:
    """The note of the newest state in a folder, unproven; None where none can be read."""
    path = next((folder / n for n in (FILE, PREVIOUS) if (folder / n).exists()), None)
    try:
        with safe_open(path, "pt") as file:
            note = json.loads(file.metadata()["fine_tune"])
            return note if isinstance(note, dict) and "format" in file.metadata() else None
    except (SafetensorError, OSError, TypeError, KeyError, ValueError):
        return None


def step_in(folder: Path) -> int:
    """The steps that the newest state in a folder says were done; 0 where there is none."""
    step = (peek(folder) or {}).get("step", 0)
    return step if isinstance(step, int) else 0


def _is_there(path: Path) -> bool:
    """Whether there is such a file. Raises OSError for a link to one that is not there."""
    if path.is_symlink() and not path.exists():
        raise OSError(
            f"{path} is a link to {os.readlink(path)}, which is not there: mount its disk, or "
            "remove the link to start again."
        )
    return path.exists()


class _NotWhole(Exception):
    """Why a file is no whole state, in a few words."""


def _read(path: Path) -> State:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if "fine_tune" not in metadata:
                raise _NotWhole("it has no note")
            if "format" not in metadata:
                raise ValueError(
                    f"{path.name} in {path.parent} was saved by an earlier version, which kept no "
                    "digest and did not say which data it belongs to: delete it and start again."
                )
            if metadata["format"] != FORMAT:
                raise ValueError(
                    f"{path.name} in {path.parent} has format {metadata['format'][:20]!r}, and "
                    f"this version reads format {FORMAT}: use the version that saved it, or "
                    "delete it and start again."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, RuntimeError) as error:
        if _number(error) in PASSING:
            raise OSError(
                f"{path} cannot be read now ({os.strerror(_number(error))}), and may be whole: "
                "keep it, and run again when this is mended."
            ) from error
        raise _NotWhole(f"it cannot be read, {_cause(error)}") from error
    if digest(metadata["fine_tune"], tensors) != metadata.get("digest"):
        raise _NotWhole("its content does not match its digest")
    return State(json.loads(metadata["fine_tune"]), tensors)


def _number(error: Exception) -> int:
    """The number of the system's error, 0 where it is none; libraries write it at the end."""
    written = re.search(r"\((?:os error )?(\d+)\)\s*$", str(error))
    return getattr(error, "errno", None) or (int(written[1]) if written else 0)


def _cause(error: Exception) -> str:
    """What an error of the system or of safetensors says, in one line without paths."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return said.partition(" at path ")[0].partition(" (os error ")[0][:120]


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


def to_json(value: Any) -> Any:
    """A number as JSON holds it: NaN and the infinities as texts, in an object."""
    return (
        {INFINITE: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value
    )


def from_json(value: Any) -> Any:
    """The number of `to_json`."""
    return float(value[INFINITE]) if isinstance(value, dict) and INFINITE in value else value


def finite(value: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    least, most = value.aminmax()  # NaN where any is
    return math.isfinite(least) and math.isfinite(most)

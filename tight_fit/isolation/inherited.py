"""What a copy of a process has from it: open files and shared memory, without a way back.

A file that is open is opened again in the copy's own tree, at the same place; what has no name gets
a copy of its content; pipes, connections and devices lead nowhere. Memory that is shared with other
processes or with a file becomes the copy's own.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass

from tight_fit.isolation import system

LARGEST = 1 << 30  # bytes of files without a name, and of shared memory, that are copied
PART = 1 << 24  # bytes that are copied at a time
_READ, _WRITE, _EXECUTE = 1, 2, 4
_PRIVATE, _FIXED, _ANONYMOUS = 2, 16, 32
GONE = " (deleted)"


@dataclass(frozen=True)
class File:
    """An open file: its descriptor, path, flags, and whether it is a file, a folder or neither."""

    number: int
    path: str
    flags: int
    mode: int


def open_files(keep: Collection[int]) -> list[File]:
    """The open files of this process above the three standard ones, without `keep`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number < 3 or number in keep:
            continue
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
            with open(f"/proc/self/fdinfo/{number}") as info:
                said = dict(line.split(":", 1) for line in info if ":" in line)
            flags = int(said["flags"], 8)
            found.append(File(number, path, flags, os.fstat(number).st_mode))
        except OSError:
            continue  # the one by which the folder was listed
    return found


def reopen(files: list[File]) -> None:
    """Let each, as it was before the tree changed, lead into the tree that is here now, or nowhere.

    Raises OSError for a file whose content cannot be given to the copy.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in files:
        try:
            new = _again(file)
        except OSError:
            if stat.S_ISREG(file.mode) and not file.flags & os.O_PATH:
                raise
            new = os.dup(nowhere)
        os.dup2(new, file.number, inheritable=os.get_inheritable(file.number))
        os.close(new)
    os.dup2(nowhere, 0)
    os.close(nowhere)


def _again(file: File) -> int:
    """A descriptor of the same content that leads to nothing outside."""
    opened = file.flags & (os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_DIRECTORY | os.O_PATH)
    if stat.S_ISDIR(file.mode) or file.flags & os.O_PATH:
        return os.open(file.path, opened)
    if not stat.S_ISREG(file.mode) or not file.path.startswith("/"):  # a namespace has no path
        return os.open(os.devnull, os.O_RDWR)
    place = os.lseek(file.number, 0, os.SEEK_CUR)
    if file.path.endswith(GONE):
        new = _copied(file)
    else:
        try:
            new = os.open(file.path, opened)
        except OSError:  # it lies in a hidden folder, or is too large to be written to in memory
            new = _copied(file)
    os.lseek(new, place, os.SEEK_SET)
    return new


def _copied(file: File) -> int:
    """A file without a name that holds the same; empty where this one cannot be read."""
    size = os.fstat(file.number).st_size
    if size > LARGEST:
        raise OSError(f"{file.path} is open, and {size:,} bytes are too many to be copied")
    new = os.memfd_create("copy")
    if file.flags & os.O_ACCMODE != os.O_WRONLY:
        at = 0
        while part := os.pread(file.number, PART, at):
            at += os.pwrite(new, part, at)
    return new


def unshare_memory() -> None:
    """Make memory that this process shares its own, with what it holds.

    What it may only read as well: a process may allow itself to write to it.

    Raises OSError where it is too large to be copied.
    """
    copied = 0
    for start, end, protection, file, at in _shared():
        flags = _PRIVATE | _FIXED
        if file is not None:
            try:
                system.map_memory(start, end - start, protection, flags, file, at)
            finally:
                os.close(file)
            continue
        copied += end - start if protection & _READ else 0
        if copied > LARGEST:
            raise OSError(f"{copied:,} bytes of shared memory are in use")
        _copy(start, end, protection)


def _shared() -> list[tuple[int, int, int, int | None, int]]:
    """(start, end, protection, open file or None, place in it) of shared memory."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            marks = fields[1]
            if "s" not in marks:
                continue
            start, end = (int(part, 16) for part in fields[0].split("-"))
            protection = sum(
                bit for mark, bit in zip("rwx", (_READ, _WRITE, _EXECUTE)) if mark in marks
            )
            path = fields[5] if len(fields) > 5 else ""
            file = _same_file(path, int(fields[4]))
            found.append((start, end, protection, file, int(fields[2], 16)))
    return found


def _same_file(path: str, inode: int) -> int | None:
    """The file that is mapped, opened to be read; None where that is not to be had."""
    if not path.startswith("/") or path.endswith(GONE):
        return None
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    found = os.fstat(file)
    if found.st_ino != inode or not stat.S_ISREG(found.st_mode):
        os.close(file)
        return None
    return file


def _copy(start: int, end: int, protection: int) -> None:
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        parts = []
        for at in range(start, end, PART) if protection & _READ else ():
            try:
                parts.append(os.pread(memory, min(PART, end - at), at))
            except OSError:  # beyond the end of the file that it stands for
                parts.append(b"")
    finally:
        os.close(memory)
    flags = _PRIVATE | _FIXED | _ANONYMOUS
    given = protection | _WRITE if parts else protection
    system.map_memory(start, end - start, given, flags, -1, 0)
    for number, part in enumerate(parts):
        ctypes.memmove(start + number * PART, part, len(part))

"""The calls of Linux that Python 3.11 does not have: namespaces, mounts, privileges.

Each raises OSError with what was tried where the system refuses it. Numbers are those of the
kernel's headers; `man 2` describes each call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEWPID, NEWNET = 0x20000000, 0x40000000
NOSUID, NODEV, NOEXEC = 2, 4, 8
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
DETACH = 2
_PDEATHSIG, _ORPHANS, _NO_NEW_PRIVS, _DROP_BOUND = 1, 36, 38, 24
_MOUNT_SETATTR, _AT_RECURSIVE, _READ_ONLY, _HERE = 442, 0x8000, 1, -100
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_CAPABILITIES = 0x20080522  # version 3 of the structures of capset
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # of a network interface

_libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _check(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def call(number: int, what: str, *arguments: Any) -> int:
    """The call of Linux with this number, and what it gives."""
    given = _libc.syscall(ctypes.c_long(number), *arguments)
    _check(given, what)
    return given


def unshare(flags: int) -> None:
    """Leave namespaces of this process for new ones. It must have a single thread."""
    _check(_libc.unshare(flags), "namespaces of its own")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system of this kind, or with `BIND` a place that is here."""
    texts = [os.fsencode(text) or None for text in (source, target, kind)]
    done = _libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(options) or None)
    _check(done, f"mount of {kind or source} on {target}")


def make_read_only(target: str) -> None:
    """Let nobody write to what is mounted at a place, and below it."""
    wanted = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    arguments = _HERE, os.fsencode(target), _AT_RECURSIVE, wanted, ctypes.c_size_t(len(wanted))
    call(_MOUNT_SETATTR, f"{target} read-only", *arguments)


def make_root(folder: str) -> None:
    """Let a folder that is a mount be the whole tree; what was there before is gone."""
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(f"no pivot_root is known for {platform.machine()}")
    os.chdir(folder)
    call(number, "a root of its own", b".", b".")
    _check(_libc.umount2(b".", DETACH), "the old root")
    os.chdir("/")


def die_with_parent(signal: int) -> None:
    """Get this signal when the thread that made this process ends."""
    _check(_libc.prctl(_PDEATHSIG, signal, 0, 0, 0), "an end with its parent")


def take_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends."""
    _check(_libc.prctl(_ORPHANS, 1, 0, 0, 0), "orphans of its own")


def drop_privileges() -> None:
    """Give up every capability, for programs that are started as well."""
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    for capability in range(64):
        if _libc.prctl(_DROP_BOUND, capability, 0, 0, 0) == -1:
            break  # the kernel knows no more
    head, none = struct.pack("Ii", _CAPABILITIES, 0), bytes(24)
    _check(_libc.capset(head, none), "capabilities given up")


def loopback_up() -> None:
    """Let this network namespace reach itself at 127.0.0.1."""
    import fcntl  # which not every system has

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _GET_FLAGS, name))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", flags | _UP))


def map_memory(address: int, length: int, protection: int, flags: int, file: int, at: int) -> int:
    """mmap, at an address; gives the address."""
    call = _libc.mmap
    call.restype = ctypes.c_void_p
    number = ctypes.c_int
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long
    found = call(address, length, protection, flags, file, at)
    if found == ctypes.c_void_p(-1).value:
        _check(-1, "memory of its own")
    return found

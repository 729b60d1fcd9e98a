"""The calls of Linux that an isolated process may not make, since no namespace holds them back.

A filter (seccomp) refuses user namespaces of its own, in which it would be root and could mount
control groups; sockets of other kinds than those that a network namespace has for itself, such as
those to the host of a virtual machine; io_uring, which makes sockets past this filter; the keys
that a session shares; to trace a process; and to write into the process that counts what the
others take, or to take its files. Numbers are those of the kernel's headers.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from tight_fit.isolation import system

# {machine: (its number for filters, {call: its number})}
_NEW = {"io_uring_setup": 425, "clone3": 435, "pidfd_getfd": 438}
_GENERIC = {"unshare": 97, "ptrace": 117, "socket": 198, "add_key": 217, "request_key": 218}
_GENERIC |= {"keyctl": 219, "clone": 220, "process_vm_writev": 271, "seccomp": 277, **_NEW}
_X86 = {"unshare": 272, "ptrace": 101, "socket": 41, "add_key": 248, "request_key": 249}
_X86 |= {"keyctl": 250, "clone": 56, "process_vm_writev": 311, "seccomp": 317, **_NEW}
MACHINES = {
    "x86_64": (0xC000003E, _X86),
    "aarch64": (0xC00000B7, _GENERIC),
    "riscv64": (0xC00000F3, _GENERIC),
}
FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
# What is not there may be done without: a C library then makes threads by clone.
MISSING = (
    *("io_uring_setup", "clone3", "add_key", "request_key", "keyctl", "ptrace"),
    *("process_vm_writev", "pidfd_getfd"),
)
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, MACHINE, FIRST = 0, 4, 16  # places in what a filter is given; arguments have 8 bytes
ALLOW, FAIL = 0x7FFF0000, 0x00050000
_OTHER_NUMBERS = 0x40000000  # of x86-64's calls for 32-bit pointers
_SET_FILTER, _AS_FAST_AS_BEFORE = 1, 4


def refuse() -> None:
    """Refuse these calls to this process and to all that it starts, from now on.

    It must have given up new privileges. Raises OSError where the system has no such filter.
    """
    found = MACHINES.get(platform.machine())
    if found is None:
        raise OSError(f"no filter of calls is known for {platform.machine()}")
    install(_filter(*found), found[1]["seccomp"])


def install(filter_lines: list[tuple[int, int, int, int]], number: int) -> None:
    """Let every call go through these lines as well; `number` is that of the call `seccomp`."""
    program = b"".join(struct.pack("HBBI", *line) for line in filter_lines)
    held = ctypes.create_string_buffer(program)
    lines = struct.pack("H6xP", len(program) // 8, ctypes.addressof(held))
    system.call(number, "a filter of its calls", _SET_FILTER, _AS_FAST_AS_BEFORE, lines)


def _filter(machine: int, numbers: dict[str, int]) -> list[tuple[int, int, int, int]]:
    """Lines (operation, lines to skip if so, lines to skip if not, value)."""

    def fail(number: int) -> tuple[int, int, int, int]:
        return (RETURN, 0, 0, FAIL | number)

    lines = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, machine),
        fail(errno.ENOSYS),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, _OTHER_NUMBERS),
        fail(errno.ENOSYS),
    ]
    for name in MISSING:
        lines += [(EQUAL, 0, 1, numbers[name]), fail(errno.ENOSYS)]
    for name in ("unshare", "clone"):
        refused = [(LOAD, 0, 0, FIRST), (ANY_BIT, 0, 1, system.NEWUSER), fail(errno.EPERM)]
        refused.append((RETURN, 0, 0, ALLOW))
        lines += [(EQUAL, 0, len(refused), numbers[name]), *refused]
    lines += [(EQUAL, 0, len(FAMILIES) + 2, numbers["socket"]), (LOAD, 0, 0, FIRST)]
    lines += [(EQUAL, len(FAMILIES) - at, 0, kind) for at, kind in enumerate(FAMILIES)]
    return [*lines, fail(errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]

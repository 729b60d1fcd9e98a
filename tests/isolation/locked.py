"""`python -m tests.isolation.locked COMMAND...`: a command that may make no namespace and no mount.

As in a container with Docker's default settings, whose filter of calls refuses both. Where the
variable NO_LANDLOCK is set, Landlock is refused as well, as by an older kernel.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

from tight_fit.isolation import calls, system

MOUNT = {"x86_64": 165, "aarch64": 40, "riscv64": 40}
LANDLOCK = 444
NAMESPACES = 0x7E020000
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def lock() -> None:
    """Refuse these calls to this process from now on."""
    machine = platform.machine()
    numbers = calls.MACHINES[machine][1]
    lines = [
        *((LOAD, 0, 0, 0), (EQUAL, 7, 0, MOUNT[machine]), (EQUAL, 6, 0, numbers["unshare"])),
        (EQUAL, 5 if "NO_LANDLOCK" in os.environ else 0, 0, LANDLOCK),
        *((EQUAL, 0, 2, numbers["clone"]), (LOAD, 0, 0, 16), (ANY_BIT, 2, 0, NAMESPACES)),
        *((RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    held = struct.pack("H6xP", len(lines), ctypes.addressof(program))
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # no new privileges
    system.call(numbers["seccomp"], "a filter", 1, 0, held)


if __name__ == "__main__":
    lock()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])

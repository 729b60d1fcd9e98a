"""Landlock and a filter of calls: a process that writes below one folder only, without namespaces.

Landlock, from Linux 6.12 on, forbids to write elsewhere, TCP, and signals and abstract sockets
that leave the process's own domain. What it does not cover, a filter (seccomp) refuses: marks of
files (modes, owners, times, attributes), sockets, ioctl beyond a few, other processes' limits, what
System V shares, and calls newer than this list. Numbers are those of the kernel's headers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from tight_fit.isolation import calls, system

LEAST = 6  # the version of Landlock that keeps signals in
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_BELOW, _VERSION = 1, 1
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_EVERY = (1 << 16) - 1  # rights over files
_REFER = 1 << 13  # to another folder
_DEVICES_MADE = 1 << 6 | 1 << 11  # of characters and of blocks
_BOTH = 3  # rights over TCP: to bind and to connect; scopes: abstract sockets and signals
DEVICES = ("null", "zero", "full", "random", "urandom")
HIDDEN = {"dev", "run", "sys"}  # what is read there may act, or be gone for others
SYSTEM = ("devices", "fs/cgroup", "class", "bus", "block", "module", "kernel/mm")

# {call: (its number on x86-64, on other machines; None where there is none)}
_MARKS = {  # answered as if done: a copy of a file has the marks that it was made with
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "setpriority": (141, 140),
}  # fmt: skip
_ATTRIBUTES = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
_SOCKETS = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
}  # fmt: skip
_REFUSED = {
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "fanotify_init": (300, 262), "setns": (308, 268),
    "process_vm_readv": (310, 270), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "mount": (165, 40), "umount2": (166, 39), "quotactl": (179, 60),
    "open_by_handle_at": (304, 265), "kcmp": (312, 272),
}  # fmt: skip
_OWN_ONLY = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}  # the first argument is 0
_PAIR, _CONTROL, _FILE = (53, 199), (16, 29), (72, 25)  # socketpair, ioctl, fcntl
_TIMES = (280, 88)  # utimensat
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, FICLONE, FICLONERANGE
CONTROLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450, 0x40049409, 0x4020940D)
_NEWEST = 424  # from here on numbers are the same on every machine, and others are refused
# close_range, openat2, faccessat2, epoll_pwait2, Landlock's, futex_waitv, cachestat, and waits for
# futexes
_NEW = (436, 437, 439, 441, 444, 445, 446, 449, 451, 454, 455, 456)
_SECOND, _THIRD, _HIGH = calls.FIRST + 8, calls.FIRST + 16, 4
_AND = 0x54


def version() -> int:
    """Of this system's Landlock; 0 where there is none."""
    try:
        return system.call(_CREATE, "Landlock", None, ctypes.c_size_t(0), _VERSION)
    except OSError:
        return 0


def write_only_below(folder: str) -> None:
    """Let this process and all that it starts write below a folder and to /dev/null alone.

    It must have given up new privileges. Raises OSError where the system cannot ensure that.
    """
    rules = _rules(_EVERY, _BOTH, 0)
    readable = [f"/{name}" for name in os.listdir("/") if name not in HIDDEN]
    try:
        _allow(rules, "/", _LIST)
        for path in (*readable, *(f"/sys/{name}" for name in SYSTEM)):
            _allow(rules, path, _EXECUTE | _READ | _LIST)
        for name in DEVICES:
            _allow(rules, f"/dev/{name}", _READ | _WRITE | _TRUNCATE | _IOCTL)
        _allow(rules, folder, _EVERY & ~_DEVICES_MADE & ~_IOCTL)
        system.call(_RESTRICT, "Landlock", rules, 0)
    finally:
        os.close(rules)


def keep_signals_in(folder: str) -> None:
    """Let this process, and all that it starts, send none to the process that made it.

    Every set of rules forbids to move files between folders but where it allows that: in `folder`.
    Raises OSError where they still come there.
    """
    rules = _rules(_REFER, 0, _BOTH)
    try:
        _allow(rules, folder, _REFER)
        system.call(_RESTRICT, "Landlock", rules, 0)
    finally:
        os.close(rules)
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return
    raise OSError(errno.EPERM, "Landlock keeps no signals in")


def _rules(files: int, net: int, scopes: int) -> int:
    held = struct.pack("QQQ", files, net, scopes)
    size = ctypes.c_size_t(len(held))
    return system.call(_CREATE, "Landlock", held, size, 0)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not here, or not ours
    try:
        if not os.path.isdir(f"/proc/self/fd/{handle}"):
            rights &= _EXECUTE | _READ | _WRITE | _TRUNCATE | _IOCTL
        system.call(_ADD, "Landlock", rules, _BELOW, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def refuse_calls() -> None:
    """Refuse what Landlock does not cover, beside what `calls.refuse` refuses."""
    found = calls.MACHINES.get(platform.machine())
    if found is None:
        raise OSError(f"no filter of calls is known for {platform.machine()}")
    calls.install(_filter(found[0], platform.machine() != "x86_64"), found[1]["seccomp"])


def _filter(machine: int, other: bool) -> list[tuple[int, int, int, int]]:
    load, equal, at_least, back = calls.LOAD, calls.EQUAL, calls.AT_LEAST, calls.RETURN
    allow = (back, 0, 0, calls.ALLOW)

    def fail(number: int) -> tuple[int, int, int, int]:
        return (back, 0, 0, calls.FAIL | number)

    lines = [(load, 0, 0, calls.MACHINE), (equal, 1, 0, machine), fail(errno.ENOSYS)]
    lines += [(load, 0, 0, calls.NUMBER), (at_least, 0, len(_NEW) + 2, _NEWEST)]
    lines += [(equal, len(_NEW) - at, 0, number) for at, number in enumerate(_NEW)]
    lines += [fail(errno.ENOSYS), allow]
    for group, answer in (
        (_MARKS, 0),
        (_ATTRIBUTES, errno.ENOTSUP),
        (_SOCKETS, errno.ENETUNREACH),
        (_REFUSED, errno.EPERM),
    ):
        for numbers in group.values():
            if (number := numbers[other]) is not None:
                lines += [(equal, 0, 1, number), fail(answer)]

    def only(number: int, place: int, values: tuple[int, ...], refused: int) -> None:
        inner = [(load, 0, 0, place)]
        inner += [(equal, len(values) - at, 0, value) for at, value in enumerate(values)]
        inner += [fail(refused), allow]
        lines.extend([(equal, 0, len(inner), number), *inner])

    for numbers in _OWN_ONLY.values():
        only(numbers[other], calls.FIRST, (0,), errno.EPERM)
    only(_CONTROL[other], _SECOND, CONTROLS, errno.ENOTTY)
    # Of datagrams each names whom it goes to; streams and packets in order go to the pair alone.
    pair = [(load, 0, 0, calls.FIRST), (equal, 1, 0, 1), fail(errno.EAFNOSUPPORT)]
    pair += [(load, 0, 0, _SECOND), (_AND, 0, 0, 0xF), (equal, 1, 0, 1), (equal, 0, 1, 5)]
    pair += [allow, fail(errno.EPROTONOSUPPORT)]
    lines += [(equal, 0, len(pair), _PAIR[other]), *pair]
    # Marks, but for "now" of a path: Path.touch asks so whether there is a file, or makes one.
    now = [(load, 0, 0, _THIRD), (equal, 0, 6, 0), (load, 0, 0, _THIRD + _HIGH), (equal, 0, 4, 0)]
    now += [(load, 0, 0, _SECOND), (equal, 0, 3, 0), (load, 0, 0, _SECOND + _HIGH)]
    now += [(equal, 0, 1, 0), fail(0), fail(errno.EPERM)]
    lines += [(equal, 0, len(now), _TIMES[other]), *now]
    # F_SETOWN and F_SETOWN_EX name whom a signal goes to.
    owner = [(load, 0, 0, _SECOND), (equal, 1, 0, 8), (equal, 0, 1, 15), fail(errno.EPERM), allow]
    lines += [(equal, 0, len(owner), _FILE[other]), *owner]
    return [*lines, allow]

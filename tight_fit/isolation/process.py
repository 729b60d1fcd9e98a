"""`fork` whose copy is alone: three processes, of which the last one returns from it.

The first leaves this process's namespaces for its own; the second is the first process of the new
process namespace, makes the tree of files, and waits; the third runs. When this process ends, each
of them gets SIGKILL, and with the second the system ends everything in its namespace.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from tight_fit.isolation import calls, inherited, limits, system
from tight_fit.isolation.places import HIDDEN, IsolatedFiles

NAMESPACES = (
    system.NEWUSER | system.NEWNS | system.NEWPID | system.NEWNET | system.NEWIPC | system.NEWUTS
)
# Where it says 1, Ubuntu lets no ordinary user be root in a namespace of his own.
RESTRICTED = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
SHARE = 4  # a copy may write files into 1 / SHARE of this machine's memory


class Unavailable(OSError):
    """This system allows no isolated process; the message says what it refuses, without an end."""


def fork(
    keep: Collection[int] = (),
    reached: tuple[str, ...] = (),
    hidden: tuple[str, ...] = (),
    memory: int | None = None,
    files: int | None = None,
) -> int:
    """As `os.fork`, with a copy that changes nothing outside itself.

    keep    open files, by their descriptors, that the copy keeps; others are cut off from it
    reached folders in which sockets can be reached that somebody outside listens on
    hidden  folders that it finds empty, beside /run
    memory  bytes that one of its processes may write to; without, this machine's memory
    files   bytes of files that it may write; without, a quarter of this machine's memory
    Raises Unavailable where the system allows none. Call it from a single thread.
    """
    if sys.platform != "linux":
        raise Unavailable("only Linux has them")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    places = IsolatedFiles(files or whole // SHARE, reached, (*HIDDEN, *hidden))
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        _first(theirs, keep, places, memory or whole)
        return 0
    theirs.close()
    with ours:
        said = ours.recv(1)
        if said == b"m":  # it has left our namespaces, and only we can say who it is there
            said = b""
            try:
                _map_users(child)
                ours.sendall(b"m")
            except OSError as error:
                _end(child)
                raise Unavailable(f"users of its own: {error.strerror}") from None
        while part := ours.recv(4096):
            said += part
    if said != b"ready":
        _end(child)
        raise Unavailable(
            (said.decode("utf8", "replace") or "a process of its own") + _whose_rule()
        )
    return child


def _whose_rule() -> str:
    """Who refuses, where that is known and can be changed."""
    try:
        restricted = os.geteuid() != 0 and RESTRICTED.read_text().strip() == "1"
    except OSError:
        restricted = False
    return (
        "; AppArmor forbids it to ordinary users, unless the administrator sets "
        "kernel.apparmor_restrict_unprivileged_userns=0"
        if restricted
        else ""
    )


def _end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _map_users(child: int) -> None:
    """Let the user be who he is, and root every user that is here."""
    folder = f"/proc/{child}"
    _write(f"{folder}/setgroups", "deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        every = [line.split() for line in open(f"/proc/self/{name}")]
        try:
            _write(f"{folder}/{name}", "".join(f"{at} {at} {count}\n" for at, _, count in every))
        except OSError:
            _write(f"{folder}/{name}", f"{own} {own} 1\n")


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _first(talk: socket.socket, keep: Collection[int], places: IsolatedFiles, memory: int) -> None:
    """Make the isolated process, and return in it alone."""
    import resource  # which not every system has

    try:
        # Handlers that this process has would run in those that wait, one of which has every file.
        open_to = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.setsid()
        limits.end_first()
        limits.go_first()
        watch = limits.MachineLimits()
        system.unshare(NAMESPACES)
        talk.sendall(b"m")
        if talk.recv(1) != b"m":
            os._exit(1)
        system.die_with_parent(signal.SIGKILL)
        if child := os.fork():
            _wait_for(child)
        system.die_with_parent(signal.SIGKILL)
        kept = {*keep, talk.fileno(), *watch.files}
        files = inherited.open_files(kept)
        inherited.unshare_memory()
        places.lay_out()
        system.loopback_up()
        limits.leave_no_core()
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        watch.limit_tasks()
        system.drop_privileges()
        calls.refuse()
        if child := os.fork():
            os._exit(watch.until_end_of(child))
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, open_to)
        limits.go_last()
        for file in watch.files:
            os.close(file)
        inherited.reopen(files)
        talk.sendall(b"ready")
        talk.close()
    except BaseException as error:
        fail(talk, error)


def fail(talk: socket.socket, error: BaseException) -> NoReturn:
    """Tell the process that asked for a copy why there is none, and end."""
    try:
        said = error.strerror if isinstance(error, OSError) else None
        talk.sendall((said or str(error)).encode())
    finally:
        os._exit(1)


def _wait_for(child: int) -> NoReturn:
    """Take leave of every process that ends here; end as that one does."""
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # who reads from it learns of its end
    while True:
        try:
            ended, status = os.wait()
        except InterruptedError:
            continue
        except BaseException:
            os._exit(1)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """What this system refuses of an isolated process, None where it allows it; tried once."""
    try:
        child = fork()
    except Unavailable as error:
        return str(error)
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return None

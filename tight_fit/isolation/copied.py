"""`fork` for where there are no namespaces: the copy works in a throw-away copy of its folder.

Three processes. The first removes what was written; the second may write nowhere else either, and
ends all that the third has started: Landlock lets it signal that, and nothing beside. The third
runs. When this process ends, the first learns of it, and tells the second.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tight_fit.isolation import calls, inherited, landlock, limits, system
from tight_fit.isolation.mirror import Mirror
from tight_fit.isolation.process import SHARE, Unavailable, fail

CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "XDG_CACHE_HOME", "TORCH_HOME")
IN_HOME = (".cache", ".cache/huggingface", ".config", ".local", ".local/share")
LEFT = 20.0  # seconds that the end of it may take


def fork(keep: Collection[int] = (), folders: Collection[str] = ()) -> int:
    """As `os.fork`, with a copy that writes only into a copy of the current folder.

    keep     open files, by their descriptors, that the copy keeps; others are cut off from it
    folders  that it finds copied as well
    `end` ends it. Raises Unavailable where the system allows none. Call it from a single thread.
    """
    if sys.platform != "linux" or landlock.version() < landlock.LEAST:
        raise Unavailable("no Landlock of Linux 6.12")
    ours, theirs = socket.socketpair()
    maker = os.getpid()
    child = os.fork()
    if not child:
        ours.close()
        _first(theirs, maker, keep, folders)
        return 0
    theirs.close()
    said = b""
    with ours:
        while part := ours.recv(4096):
            said += part
    if said != b"ready":
        end(child)
        raise Unavailable(said.decode("utf8", "replace") or "a process of its own")
    return child


def end(child: int) -> int:
    """End a copy with all that it has started, and give its status as `os.waitpid` does."""
    os.kill(child, signal.SIGTERM)
    until = time.monotonic() + LEFT
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _first(
    talk: socket.socket, maker: int, keep: Collection[int], folders: Collection[str]
) -> None:
    """Make the isolated process, and return in it alone."""
    try:
        open_to = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.setsid()
        _heed(maker)
        scratch = os.path.realpath(tempfile.mkdtemp(prefix="planned-"))
    except BaseException as error:
        fail(talk, error)
    try:
        mirror = _mirrored(scratch, folders)
        first = os.getpid()
        if child := os.fork():
            talk.close()
            _remove_after(child, scratch)
        _heed(first)
        _second(talk, keep, mirror, open_to)
    except BaseException as error:
        if os.getpid() == first:
            _remove(scratch)
        fail(talk, error)


def _heed(maker: int) -> None:
    """Get SIGTERM, which is blocked and asked for, when the process that made this one ends."""
    system.die_with_parent(signal.SIGTERM)
    if os.getppid() != maker:
        os.kill(os.getpid(), signal.SIGTERM)


def _mirrored(scratch: str, folders: Collection[str]) -> Mirror:
    mirror = Mirror(f"{scratch}/tree")
    os.mkdir(f"{scratch}/tmp")
    home = os.path.expanduser("~")
    for folder in (home, *(os.path.join(home, name) for name in IN_HOME)):
        if os.path.isdir(folder):
            mirror.shallow(folder)
    caches = [os.path.join(home, ".cache/huggingface/datasets")]
    caches += [path for name in CACHES if (path := os.environ.get(name))]
    for folder in (os.getcwd(), *folders, *caches):
        if os.path.isdir(folder):
            mirror.deep(folder)
    return mirror


def _remove_after(child: int, scratch: str) -> None:
    """Tell the second process to end when this one is told, and remove what is left of it."""
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        got = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, 1.0)
        if got is not None and got.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
    _remove(scratch)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _remove(folder: str) -> None:
    """By programs that follow no link, and that no depth of folders ends."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if subprocess.call(["rm", "-rf", "--", folder], **quiet):
        opened = ["find", folder, "-type", "d", "-exec", "chmod", "u+rwx", "{}", ";"]
        subprocess.call(opened, **quiet)
        subprocess.call(["rm", "-rf", "--", folder], **quiet)


def _second(talk: socket.socket, keep: Collection[int], mirror: Mirror, open_to: set[Any]) -> None:
    import resource  # which not every system has

    scratch = os.path.dirname(mirror.root)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    system.take_orphans()
    limits.go_first()
    watch = limits.MachineLimits()
    folder = os.open(scratch, os.O_PATH)
    kept = {*keep, talk.fileno(), folder, *watch.files}
    system.drop_privileges()
    landlock.write_only_below(scratch)
    landlock.keep_signals_in(scratch)
    second = os.getpid()
    if child := os.fork():
        status = 1
        try:
            status = watch.until_end_of(child, folder, whole // SHARE)
        finally:
            _end_all()
            os._exit(status)
    try:
        system.die_with_parent(signal.SIGKILL)
        if os.getppid() != second:
            os._exit(1)
        os.setsid()
        files = inherited.open_files(kept)
        inherited.unshare_memory()
        limits.leave_no_core()
        resource.setrlimit(resource.RLIMIT_DATA, (whole, whole))
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole // SHARE, whole // SHARE))
        watch.limit_tasks()
        landlock.keep_signals_in(scratch)
        limits.go_last()
        calls.refuse()
        landlock.refuse_calls()
        for file in (*watch.files, folder):
            os.close(file)
        inherited.reopen([replace(file, path=mirror.own(file.path)) for file in files])
        _move_into(mirror)
        signal.pthread_sigmask(signal.SIG_SETMASK, open_to)
        talk.sendall(b"ready")
        talk.close()
    except BaseException as error:
        fail(talk, error)


def _end_all() -> None:
    """End every process of this one's domain, which are those that the third has started."""
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError:
            pass  # there is none any more
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)
        except ChildProcessError:
            return


def _move_into(mirror: Mirror) -> None:
    """Let this process find its folder, home and caches in the copy."""
    os.chdir(mirror.place(os.getcwd()))
    os.environ["HOME"] = mirror.place(os.path.expanduser("~"))
    os.environ["TMPDIR"] = os.path.dirname(mirror.root) + "/tmp"
    os.environ["PWD"] = os.getcwd()
    tempfile.tempdir = None
    for name in CACHES:
        if os.path.isdir(os.environ.get(name, "")):
            os.environ[name] = mirror.place(os.environ[name])

    def hook(event: str, given: tuple) -> None:
        """Python's own writers find a file where there was a link to a large one."""
        if event == "open" and isinstance(given[0], (str, bytes, os.PathLike)):
            if given[2] & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
                mirror.give_room(os.fsdecode(given[0]), bool(given[2] & os.O_TRUNC))

    sys.addaudithook(hook)

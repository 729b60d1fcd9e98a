"""What a process reaches that is isolated by Landlock and a copy of its folder, without namespaces.

As the user who runs the tests, and where that is root, as an ordinary one as well.
"""

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.isolation import digest
from tests.isolation.homes import end_of, holds, started
from tight_fit.isolation import landlock, limits, mirror

pytestmark = pytest.mark.skipif(
    landlock.version() < landlock.LEAST, reason="no Landlock that keeps signals in"
)
CALL = """\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *given):
    given = [ctypes.c_void_p(one) if isinstance(one, int) else one for one in given]
    return libc.syscall(ctypes.c_long(number), *given), ctypes.get_errno()
best = os.path.join(real, "best.pt")
"""
REFUSES = "try: {}\nexcept OSError as error: assert error.errno in {}, error\nelse: assert False\n"
# By its whole path, which is no part of the copy: {name: (deed, numbers of its error)}.
OUTSIDE = {
    "writes": ("open(best, 'w')", (13,)),
    "empties what it may only read": ("os.open(best, os.O_RDONLY | os.O_TRUNC)", (13,)),
    "truncates": ("os.truncate(best, 0)", (13,)),
    "removes": ("os.remove(best)", (13,)),
    "moves here": ("os.rename(best, 'x')", (13, 18)),
    "moves there": ("os.rename('best.pt', os.path.join(real, 'x'))", (13, 18)),
    "links here": ("os.link(best, 'twin')", (13, 18)),
    "opens what is open again": ("open('/proc/self/fd/%d' % os.open(best, 0), 'r+')", (13,)),
    "opens by the root of a process": ("open('/proc/self/root' + best, 'r+')", (13,)),
    "sets an attribute": ("os.setxattr(best, 'user.x', b'1')", (95,)),
    "sets flags": (
        "__import__('fcntl').ioctl(os.open(best, 0), 0x40086602, (64).to_bytes(8, 'little'))",
        (25,),
    ),
    "makes a folder": ("os.mkdir(os.path.join(real, 'new'))", (13,)),
    "makes a file without a name": ("os.open(real, os.O_TMPFILE | os.O_RDWR)", (13,)),
    "writes shared memory": ("open('/dev/shm/planned', 'w')", (13,)),
    "writes settings of the kernel": ("open('/proc/sys/kernel/core_pattern', 'r+')", (13,)),
    "writes elsewhere for temporary files": ("open('/tmp/planned', 'w')", (13,)),
}
# Answered as if done, and not done.
UNDONE = ("os.chmod(best, 0)", "os.utime(best, (1, 1))", "os.chown(best, 1, 1)")


def test_what_lies_outside_the_copy_can_only_be_read(user, home):
    folder = home(user)
    before = digest(folder)
    marks = (folder / "best.pt").stat()
    text = CALL + "".join(REFUSES.format(deed, numbers) for deed, numbers in OUTSIDE.values())
    text += "\n".join(UNDONE) + "\nassert open(best).read() == 'weights'\n"
    holds(user, folder, "real = os.getcwd()", text, "folder")
    assert digest(folder) == before and (folder / "best.pt").stat().st_ctime_ns == marks.st_ctime_ns


def test_no_connection_leads_out(user, home):
    """Not even by a datagram of a pair; streams of a pair, and pipes, work."""
    folder = home(user)
    text = """\
import socket
for family, kind, where in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
    (socket.AF_UNIX, socket.SOCK_STREAM, os.path.join(real, "service")),
    (socket.AF_UNIX, socket.SOCK_STREAM, "\\0service"),
    (socket.AF_NETLINK, socket.SOCK_RAW, (0, 0)),
):
    try: socket.socket(family, kind).connect(where)
    except OSError as error: assert error.errno == 101, error
    else: assert False, where
try: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
except OSError as error: assert error.errno == 93, error
else: assert False
one, other = socket.socketpair()
one.sendall(b"x"); assert other.recv(1) == b"x"
import asyncio; asyncio.run(asyncio.sleep(0))
"""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "service"))
        unix.listen()
        before = f"real = os.getcwd(); port = {server.getsockname()[1]}"
        holds(user, folder, before, text, "folder")


def test_no_other_process_is_reached(user, home):
    """Neither by signals and limits nor by its memory; those that it starts are."""
    text = """\
import ctypes, fcntl, platform, resource, signal, subprocess
from tight_fit.isolation import calls
libc = ctypes.CDLL(None, use_errno=True)
for number in (0, signal.SIGKILL):
    for there in (maker, os.getppid()):
        try: os.kill(there, number)
        except PermissionError: pass
        else: assert False, there
for deed in (
    lambda: resource.prlimit(maker, resource.RLIMIT_NOFILE, (5, 5)),
    lambda: os.sched_setaffinity(maker, {0}),
    lambda: open(f"/proc/{maker}/mem", "rb"),
    lambda: open(f"/proc/{maker}/environ").read(),
    lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, maker),
    lambda: os.pidfd_open(maker),
):
    try: deed()
    except OSError as error: assert error.errno in (1, 13, 38), error
    else: assert False, deed
os.setpriority(os.PRIO_USER, os.getuid(), 19)
child = subprocess.Popen(["sleep", "60"]); child.kill(); assert child.wait() == -9
"""
    holds(user, home(user), "maker = os.getpid()", text, "folder")
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_deep_and_closed_folders_are_removed(user, home):
    deed = """\
print(os.getcwd(), flush=True)
os.mkdir("closed"); os.mkdir("closed/inner", 0)
for _ in range(3000): os.mkdir("d"); os.chdir("d")
"""
    pipe = {"stdout": subprocess.PIPE}
    process = started(user, home(user), "", deed, "folder", **pipe)
    told, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert not Path(told.strip()).exists()


def test_a_copy_that_fills_the_disk_is_ended(home):
    before = """\
from tight_fit.isolation import limits
free, calls = limits._free, []
def less(folder):
    calls.append(1)
    return (free(folder) if len(calls) == 1 else (0, 0))
limits._free = less
"""
    deed = "import time; time.sleep(30)"
    status, said = end_of(started(None, home(None), before, deed, "folder"))
    assert status == limits.TOO_FULL, said


def test_a_folder_is_the_same_by_relative_paths_and_links(tmp_path, monkeypatch):
    """Large files, folders for which there is no room and what lies beside it are links."""
    work, root = tmp_path / "work", tmp_path / "root"
    for name in ("work/data", "work/many", "beside"):
        (tmp_path / name).mkdir(parents=True)
    (work / "small").write_text("small")
    (work / "large").write_bytes(bytes(mirror.SMALL + 1))
    (work / "to-small").symlink_to("small")
    (work / "to-beside").symlink_to("../beside")
    (tmp_path / "beside" / "x").write_text("x")
    os.mkfifo(work / "data" / "fifo")
    for number in range(200):
        (work / "many" / str(number)).touch()
    made = mirror.Mirror(str(root))
    made.shallow(str(tmp_path))
    made.names = 100
    made.deep(str(work))
    there = Path(made.place(str(work)))
    assert (there / "small").read_text() == "small" and not (there / "small").is_symlink()
    assert (there / "large").is_symlink() and (there / "many").is_symlink()
    assert os.readlink(there / "to-small") == "small"
    assert (there / "to-beside" / "x").read_text() == "x"
    assert (there / ".." / "beside" / "x").read_text() == "x"
    assert (there / "data").is_dir() and not (there / "data").is_symlink()
    made.give_room(str(there / "large"), emptied=False)
    assert not (there / "large").is_symlink()
    assert (there / "large").stat().st_size == mirror.SMALL + 1
    made.names = 1
    with pytest.raises(OSError, match="too many files for a copy"):
        made.deep(str(work / "many"))


def test_making_the_copy_writes_to_no_file_of_the_user_s(tmp_path):
    """Whatever the names of files beside each other, and where one cannot be copied."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("x", "x.new", "x.new.new", "x~", ".x"):
        (work / name).write_text(name)
    (work / "link.new").symlink_to("x")
    (work / "link").write_text("link")
    before = digest(work)
    made = mirror.Mirror(str(tmp_path / "root"))
    made.deep(str(work))
    assert digest(work) == before
    there = Path(made.place(str(work)))
    assert {path.name: path.read_text() for path in there.iterdir() if not path.is_symlink()} == {
        path.name: path.read_text() for path in work.iterdir() if not path.is_symlink()
    }


def test_numbers_of_calls_are_those_of_the_kernel_s_headers():
    headers = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    if not all(map(os.path.exists, headers)):
        pytest.skip("no headers of the kernel here")
    found = [
        dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(path).read_text()))
        for path in headers
    ]
    tables = (landlock._MARKS, landlock._ATTRIBUTES, landlock._SOCKETS, landlock._REFUSED)
    named = {"socketpair": landlock._PAIR, "ioctl": landlock._CONTROL, "fcntl": landlock._FILE}
    for table in (*tables, landlock._OWN_ONLY, named):
        for name, numbers in table.items():
            for known, number in zip(found, numbers):
                assert number is None or known[name] == str(number), name

"""Programs that destroy: in an isolated process they leave a home and a checkout as they were.

As the user who runs the tests, and where that is root, as an ordinary one as well.
"""

import hashlib
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from tests.isolation import ends_with_all, heeding, with_mark
from tests.isolation.homes import BEFORE, USERS, each_by_one_user, end_of, started
from tight_fit import isolation

pytestmark = pytest.mark.skipif(
    isolation.why_not() is not None, reason=f"no isolated process here: {isolation.why_not()}"
)
SPAWNS = """\
import sys, subprocess
code = "import os, time; os.setsid(); open('began', 'w').close(); time.sleep(60)"
os.posix_spawn(sys.executable, [sys.executable, '-c', code], os.environ)
while not os.path.exists('began'): pass
"""
# {name: (what the process does before it is copied, what the copy does)}
DEEDS = {
    "renames": ("", "os.replace('best.pt', 'prev.pt'); assert open('prev.pt').read() == 'weights'"),
    "removes everything": ("", "assert os.system('rm -rf ./* .git') == 0; assert not os.listdir()"),
    "removes and makes anew": (
        "",
        "import shutil; shutil.rmtree('data'); os.mkdir('data'); assert os.listdir('data') == []",
    ),
    "moves a folder": ("", "assert os.system('mv data old') == 0; os.stat('old/1.txt')"),
    "appends": ("", "open('best.pt', 'a').write('!'); assert open('best.pt').read()[-1] == '!'"),
    "adds to a folder": (
        "",
        "open('data/3.txt', 'w').write('three'); assert len(os.listdir('data')) == 3",
    ),
    "changes modes": ("", "os.chmod('best.pt', 0); os.utime('data', (1, 1))"),
    "cleans a checkout": ("", "assert os.system('git clean -fdxq && git checkout -q .') == 0"),
    "commits": ("", "assert os.system('git add -A && git commit -qm x') == 0"),
    "writes a database": (
        "",
        "import sqlite3; d = sqlite3.connect('runs.db'); d.execute('delete from runs'); d.commit()"
        "; assert not d.execute('select * from runs').fetchall()",
    ),
    "writes a database that is open": (
        "import sqlite3\nd = sqlite3.connect('runs.db')\n"
        "d.execute('select * from runs').fetchall()",
        "d.execute('delete from runs'); d.commit()",
    ),
    "writes from Rust": (
        "",
        "import numpy, safetensors.numpy as s; s.save_file({'x': numpy.ones(3)}, 'best.pt')",
    ),
    "writes from C": (
        "",
        "import ctypes; c = ctypes.CDLL(None); f = c.open(b'best.pt', os.O_WRONLY | os.O_TRUNC)"
        "; assert c.write(f, b'gone', 4) == 4",
    ),
    "writes to an open file": (
        "log = open('best.pt', 'r+'); log.read()",
        "log.write('!'); log.flush(); assert open('best.pt').read() == 'weights!'",
    ),
    "writes by an open folder": (
        "here = os.open('.', os.O_RDONLY)",
        "os.unlink('best.pt', dir_fd=here); os.close(os.open('x', os.O_CREAT, dir_fd=here))",
    ),
    "writes to a mapped file": (
        "import numpy; m = numpy.memmap('best.pt', 'u1', 'r+'); before = bytes(m)",
        "assert bytes(m) == before; m[:] = 0; m.flush(); assert not bytes(m).strip(b'\\0')",
    ),
    "writes to a mapped file that it may only read": (
        "import ctypes, mmap; f = open('best.pt', 'r+b')\n"
        "m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)",
        "c = ctypes.CDLL(None)\n"
        "line = next(line for line in open('/proc/self/maps') if 'best.pt' in line)\n"
        "at = int(line.split('-')[0], 16)\n"
        "assert c.mprotect(ctypes.c_void_p(at), 4096, 3) == 0\n"
        "ctypes.memmove(at, b'gone', 4); assert m[:4] == b'gone'",
    ),
    "links a file": ("", "os.link('best.pt', 'twin'); open('twin', 'w').write('x')"),
    "leaves a process": ("", SPAWNS),
    "signals its group, for which a handler is there": (
        "import signal\ndef save(*told): open(f'saved-{os.getpid()}', 'w').write('!')\n"
        "signal.signal(signal.SIGUSR1, save)",
        "import time; os.kill(0, signal.SIGUSR1); time.sleep(0.5)\n"
        "os.killpg(os.getpgrp(), signal.SIGUSR1); os.kill(os.getppid(), signal.SIGUSR1)\n"
        "time.sleep(0.5); assert os.path.exists(f'saved-{os.getpid()}')",
    ),
}


def digest(folder: Path) -> dict[str, tuple]:
    """{path: (mode, owner, time of the last change, digest)} of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        marks = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(marks.st_mode) else b""
        held = marks.st_mode, marks.st_uid, marks.st_mtime_ns, hashlib.sha256(content).hexdigest()
        found[str(path.relative_to(folder))] = held
    return found


@pytest.mark.parametrize("name, user", each_by_one_user(DEEDS))
def test_a_deed_changes_nothing_outside(name, user, home):
    folder = home(user)
    before = digest(folder)
    first, deed = DEEDS[name]
    status, said = end_of(started(user, folder, BEFORE + first, deed, name))
    assert status == 0, said
    assert digest(folder) == before


def test_the_same_deeds_change_a_home_where_nothing_isolates(home):
    for name, (first, deed) in DEEDS.items():
        if name == "leaves a process":
            continue
        folder = home(None)
        before = digest(folder)
        process = started(None, folder, BEFORE + first, deed, "", start_new_session=True)
        status, said = end_of(process)
        assert status == 0, said
        assert digest(folder) != before, name


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_outlives_the_process_that_made_it(how, user, home):
    """Neither the copy nor what it started, also where its maker is killed."""
    mark = f"mark-{os.getpid()}-{how}-{user}"
    folder = home(user)
    code = f"import os, sys, time; os.setsid(); time.sleep(600)  # {mark}"
    deed = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {code!r}])\n"
        "print('began', flush=True); time.sleep(600)"
    )
    pipe = {"stdout": subprocess.PIPE, "preexec_fn": heeding(how)}
    process = started(user, folder, BEFORE, deed, mark, **pipe)
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n", process.communicate()
    assert len(with_mark(mark)) >= 4
    ends_with_all(process, how, mark)


@pytest.mark.parametrize("user", USERS)
def test_no_connection_leads_out_and_its_own_are_its_own(user, home):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"""\
import errno
for host in ("127.0.0.1", "10.0.0.1"):
    try: socket.create_connection((host, {port}), timeout=5)
    except OSError as error: assert error.errno in (errno.ECONNREFUSED, errno.ENETUNREACH), error
    else: assert False, host
with socket.create_server(("127.0.0.1", {port})):
    socket.create_connection(("127.0.0.1", {port})).close()
"""
        status, said = end_of(started(user, home(user), BEFORE + "import socket", text, "net"))
        assert status == 0, said


@pytest.mark.parametrize("user", USERS)
def test_a_service_that_listens_in_a_folder_is_not_reached(user, home):
    """As those of Docker, a desktop or a keeper of keys do; outside, the same user reaches it."""
    folder = home(user)
    reach = """\
import socket
try: socket.socket(socket.AF_UNIX).connect("service")
except ConnectionRefusedError: reached = False
else: reached = True
"""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "service"))
        server.listen()
        os.chmod(folder / "service", 0o777)
        for mark, expected in (("unix", False), ("", True)):
            text = f"{reach}assert reached is {expected}"
            status, said = end_of(started(user, folder, BEFORE, text, mark))
            assert status == 0, said


@pytest.mark.parametrize("user", USERS)
def test_what_belongs_to_the_system_stays_as_it_is(user, home):
    """Devices, settings of the kernel, other processes: a tree has none of them to write to."""
    text = """\
import glob, signal
assert set(os.listdir("/dev")) <= set(
    "null zero full random urandom shm fd stdin stdout stderr".split())
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/mm/ksm/run"):
    try: open(path, "r+")
    except OSError: pass
    else: assert False, path
assert all(int(pid) < 20 for pid in os.listdir("/proc") if pid.isdigit()), os.listdir("/proc")
assert not os.listdir("/run")
for line in open("/proc/self/status"):
    assert not line.startswith(("CapEff", "CapPrm", "CapBnd")) or not int(line.split()[1], 16)
assert os.system("mount -t tmpfs tmpfs /mnt 2>/dev/null") != 0
for name in ("null", "zero", "urandom"):
    try: os.chmod(f"/dev/{name}", 0o666)
    except OSError: open(f"/dev/{name}", "r+b", buffering=0).close()
    else: assert False, name
"""
    status, said = end_of(started(user, home(user), BEFORE, text, "system"))
    assert status == 0, said


def test_shared_memory_and_files_without_a_name_are_the_copy_s_own(home):
    before = """\
import mmap, tempfile, torch
memory = mmap.mmap(-1, 4096)
memory[:2] = b"ab"
shared = torch.ones(3).share_memory_()
file = tempfile.TemporaryFile()
file.write(b"before"); file.flush()
read, write = os.pipe()
def after(child):
    import atexit
    def check():
        assert memory[:2] == b"ab" and shared.tolist() == [1, 1, 1]
        file.seek(0); assert file.read() == b"before"
        os.set_blocking(read, False)
        try: os.read(read, 1)
        except BlockingIOError: return
        assert False
    try: check()
    except BaseException as error: print(repr(error), flush=True); os._exit(9)
real_wait = os.waitpid
os.waitpid = lambda child, how: (lambda found: (after(child), found)[1])(real_wait(child, how))
"""
    deed = """\
assert memory[:2] == b"ab" and shared.tolist() == [1, 1, 1]
memory[:2] = b"xy"; shared.zero_(); file.write(b" after"); file.flush()
file.seek(0); assert file.read() == b"before after"
os.write(write, b"x")
"""
    folder = home(None)
    status, said = end_of(started(None, folder, BEFORE + before, deed, "memory"))
    assert status == 0, said
    assert end_of(started(None, folder, BEFORE + before, deed, ""))[0] == 9


def test_where_there_is_none_it_says_what_is_refused(home):
    """An isolated process can make none itself: its /proc cannot be written."""
    text = """\
from tight_fit import isolation
try: isolation.fork()
except isolation.Unavailable as error: assert "own" in str(error), error
else: assert False
"""
    status, said = end_of(started(None, home(None), BEFORE, text, "nested"))
    assert status == 0, said


@pytest.mark.parametrize("user", USERS)
def test_whose_rule_it_is_where_that_is_known(user, home):
    """Ubuntu's, for ordinary users, which an administrator changes."""
    folder = home(user)
    (folder / "rule").write_text("1\n")
    (folder / "rule").chmod(0o644)
    text = """\
from pathlib import Path
from tests.isolation.locked import lock
from tight_fit.isolation import process
lock()
process.RESTRICTED = Path("rule")
try: process.fork()
except process.Unavailable as error: said = str(error)
assert said.startswith("namespaces of its own: Operation not permitted"), said
assert ("restrict_unprivileged_userns=0" in said) == bool(os.geteuid()), said
"""
    status, said = end_of(started(user, folder, BEFORE, text, ""))
    assert status == 0, said


@pytest.mark.parametrize("refused", ["'proc'", "'/proc', 'proc'"])
def test_a_container_that_refuses_proc_is_enough(refused, home):
    """Where nothing of it may be mounted, a process finds what it says of the machine."""
    before = f"""\
from tight_fit.isolation import system
mount = system.mount
def without(source, *arguments, **options):
    if source in ({refused},): raise OSError(1, "refused")
    return mount(source, *arguments, **options)
system.mount = without
"""
    deed = """\
import torch, psutil
assert psutil.virtual_memory().total > 0
try: open("/proc/sys/kernel/core_pattern", "r+")
except OSError: pass
else: assert False
os.remove("best.pt")
torch.ones(3, requires_grad=True).sum().backward()
"""
    folder = home(None)
    status, said = end_of(started(None, folder, BEFORE + before, deed, "no proc"))
    assert status == 0, said
    assert (folder / "best.pt").exists()

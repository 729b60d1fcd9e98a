"""What a process in namespaces of its own sees and reaches. Deeds are in test_deeds.py."""

import os
import socket

import pytest

from tests.isolation.homes import end_of, holds, started
from tight_fit import isolation

pytestmark = pytest.mark.skipif(
    isolation.why_not() is not None, reason=f"no isolated process here: {isolation.why_not()}"
)


def test_no_connection_leads_out_and_its_own_are_its_own(user, home):
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = f"""\
import errno, socket
there = ("127.0.0.1", {server.getsockname()[1]})
for host in ("127.0.0.1", "10.0.0.1"):
    try: socket.create_connection((host, there[1]), timeout=5)
    except OSError as error: assert error.errno in (errno.ECONNREFUSED, errno.ENETUNREACH), error
    else: assert False, host
with socket.create_server(there): socket.create_connection(there).close()
"""
        holds(user, home(user), "", text)


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
        holds(user, folder, "", f"{reach}assert not reached")
        holds(user, folder, "", f"{reach}assert reached", "")


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
    holds(user, home(user), "", text)


def test_shared_memory_open_files_and_connections_are_the_copy_s_own(home):
    before = """\
import mmap, socket, tempfile, torch
memory = mmap.mmap(-1, 4096)
memory[:2] = b"ab"
shared = torch.ones(3).share_memory_()
file = tempfile.TemporaryFile()
file.write(b"before"); file.flush()
log = open("train.log", "a+")
print("before", file=log, flush=True)
read, write = os.pipe()
here, there = socket.socketpair()
def after(child):
    def check():
        assert memory[:2] == b"ab" and shared.tolist() == [1, 1, 1]
        assert file.tell() == 6; file.seek(0); assert file.read() == b"before"
        assert log.tell() == 7 and open("train.log").read() == "before\\n"
        print("after", file=log, flush=True)
        assert open("train.log").read() == "before\\nafter\\n"
        for end in (read, there.fileno()):
            os.set_blocking(end, False)
            try: os.read(end, 1)
            except BlockingIOError: continue
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
print("in the copy", file=log, flush=True)
assert open("train.log").read().endswith("in the copy\\n")
os.write(write, b"x")
try: here.send(b"x")
except OSError: pass
"""
    holds(None, home(None), before, deed)
    assert end_of(started(None, home(None), before, deed, ""))[0] == 9


def test_where_there_is_none_it_says_what_is_refused(home):
    """An isolated process can make none itself: its /proc cannot be written."""
    text = """\
from tight_fit import isolation
try: isolation.fork()
except isolation.Unavailable as error: assert "own" in str(error), error
else: assert False
"""
    holds(None, home(None), "", text)


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
    holds(user, folder, "", text, "")


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
    holds(None, folder, before, deed)
    assert (folder / "best.pt").exists()

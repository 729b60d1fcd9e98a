"""What an isolated process may not take or call, as the user who runs the tests and as another."""

import psutil
import pytest

from tests.isolation.homes import end_of, holds, started
from tight_fit import isolation
from tight_fit.isolation import limits

pytestmark = pytest.mark.skipif(
    isolation.why_not() is not None, reason=f"no isolated process here: {isolation.why_not()}"
)


def test_calls_that_no_namespace_holds_back_are_refused(user, home):
    """And those beside them are not: threads, programs, sockets of its own."""
    text = """\
import ctypes, errno, platform, socket, subprocess, threading
from tight_fit.isolation.calls import MACHINES
libc = ctypes.CDLL(None, use_errno=True)
numbers = MACHINES[platform.machine()][1]
def errno_of(name, *arguments):
    assert libc.syscall(ctypes.c_long(numbers[name]), *arguments) == -1, name
    return ctypes.get_errno()
for flags in (0x10000000, 0x10020000, 0x7C020000):  # user namespaces
    assert errno_of("unshare", flags) == errno.EPERM
    assert errno_of("clone", flags | 17, None, None, None, None) == errno.EPERM
for family in (40, 38, 31):  # hosts of virtual machines, the kernel's ciphers, Bluetooth
    try: socket.socket(family, socket.SOCK_STREAM)
    except OSError as error: assert error.errno == errno.EAFNOSUPPORT, error
    else: assert False, family
for name in ("io_uring_setup", "clone3", "add_key", "keyctl", "request_key", "ptrace"):
    assert errno_of(name, None, None, None, None, None) == errno.ENOSYS, name
# The first process of the namespace, which counts what the others take.
assert errno_of("pidfd_getfd", os.pidfd_open(1), 0, 0) == errno.ENOSYS
memory = ctypes.create_string_buffer(8)
with open("/proc/1/maps") as maps:
    there = next(int(line.split("-")[0], 16) for line in maps if " rw-p " in line)
own = (ctypes.c_void_p * 2)(ctypes.addressof(memory), 8)
assert errno_of("process_vm_writev", 1, own, 1, (ctypes.c_void_p * 2)(there, 8), 1, 0) == 38
done = []
thread = threading.Thread(target=done.append, args=(1,)); thread.start(); thread.join()
assert done and subprocess.run(["true"]).returncode == 0
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6): socket.socket(family).close()
assert libc.unshare(0x400) == 0  # open files of its own
"""
    holds(user, home(user), "", text)


def test_a_copy_that_multiplies_is_ended_with_all_that_it_started(user, home):
    text = """\
import threading
from tight_fit.isolation import limits
threading.stack_size(1 << 15)
def wait(): threading.Event().wait(60)
try:
    for number in range(limits.TASKS + 2000): threading.Thread(target=wait, daemon=True).start()
except RuntimeError: assert number > limits.TASKS // 2, number
threading.Event().wait(30)
"""
    before = "from tight_fit.isolation import limits; limits.TASKS = 400"
    status, said = end_of(started(user, home(user), before, text, "many"))
    refused_by_the_system = status == 0 and user is not None
    assert status == limits.TOO_MANY or refused_by_the_system, said


def test_a_copy_that_leaves_the_machine_no_memory_is_ended(home):
    """Memory that counts for no process: of a file without a name."""
    before = """\
from tight_fit.isolation import limits
make = limits.MachineLimits.__init__
def watched(watch):
    make(watch)
    watch.least = watch.available - (1 << 28)
limits.MachineLimits.__init__ = watched
"""
    deed = """\
import time
file = os.memfd_create("large")
for _ in range(1 << 9): os.write(file, bytes(1 << 20))
time.sleep(30)
"""
    status, said = end_of(started(None, home(None), before, deed, "memory"))
    assert status == limits.TOO_LARGE, said


def test_a_crash_starts_no_handler_of_the_system(user, home):
    """Linux starts one at a limit of 0 bytes as well, and none at 1 byte."""
    text = "import resource; assert resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)"
    holds(user, home(user), "", text)


def test_limits_hold(home):
    folder = home(None)
    write = "f = open({!r}, 'wb')\nfor _ in range({}): f.write(bytes(1 << 20)); f.flush()"
    status, said = end_of(started(None, folder, "", write.format("/dev/shm/x", 65), "files"))
    assert status == 1 and "No space left on device" in said
    holds(None, folder, "", write.format("y", 60))
    total = psutil.virtual_memory().total
    holds(
        None,
        folder,
        "import resource",
        f"assert resource.getrlimit(resource.RLIMIT_DATA)[0] == {total}",
    )

"""Programs that destroy: in an isolated process they leave a home and a checkout as they were.

In namespaces, and where there are none, in a copy of the folder that Landlock guards. As the user
who runs the tests, and where that is root, as an ordinary one as well.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.isolation import digest, ends_with_all, heeding, with_mark
from tests.isolation.homes import each_by_one_user, end_of, holds, started
from tight_fit import isolation
from tight_fit.isolation import landlock

KINDS = [
    pytest.param("", marks=pytest.mark.skipif(
        isolation.why_not() is not None, reason=f"no isolated process here: {isolation.why_not()}"),
        id="namespaces"),
    pytest.param("folder ", marks=pytest.mark.skipif(
        landlock.version() < landlock.LEAST, reason="no Landlock that keeps signals in"),
        id="copy"),
]  # fmt: skip
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
    "changes modes": ("", "os.chmod('best.pt', 0); os.utime('data', (1, 1))"),
    "marks that it is done": (
        "from pathlib import Path",
        "Path('done').touch(); Path('done').touch(); assert Path('done').exists()"
        "; os.utime('done', (1, 1)); assert os.system('touch done new') == 0; os.stat('new')",
    ),
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


# What has the folder's own path, or leads to who made the copy: what a copy of the folder refuses.
FORBIDDEN = {
    "signals its group, for which a handler is there": "Operation not permitted",
    "writes a database that is open": "readonly database",
}


@pytest.mark.parametrize("name, user", each_by_one_user(DEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_a_deed_changes_nothing_outside(kind, name, user, home):
    folder = home(user)
    before = digest(folder)
    first, deed = DEEDS[name]
    status, said = end_of(started(user, folder, first, deed, kind + name))
    assert digest(folder) == before
    if kind and name in FORBIDDEN:
        assert status == 1 and FORBIDDEN[name] in said, said
    else:
        assert status == 0, said


def test_the_same_deeds_change_a_home_where_nothing_isolates(home):
    for name, (first, deed) in DEEDS.items():
        if name != "leaves a process":
            folder = home(None)
            before = digest(folder)
            holds(None, folder, first, deed, "", start_new_session=True)
            assert digest(folder) != before, name


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_the_process_that_made_it(kind, how, user, home):
    """Neither the copy nor what it started, nor its folder, also where its maker is killed."""
    mark = f"{kind}mark-{os.getpid()}-{how}-{user}"
    code = f"import os, sys, time; os.setsid(); time.sleep(600)  # {mark}"
    deed = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen(['setsid', sys.executable, '-c', {code!r}])\n"
        "print(os.getcwd(), flush=True); time.sleep(600)"
    )
    pipe = {"stdout": subprocess.PIPE, "preexec_fn": heeding(how)}
    folder = home(user)
    process = started(user, folder, "", deed, mark, **pipe)
    assert process.stdout is not None
    where = Path(process.stdout.readline().strip())
    assert where.is_absolute(), process.communicate()
    assert len(with_mark(mark)) >= (3 if kind else 4)
    assert not kind or where.is_dir() and "planned-" in str(where)
    ends_with_all(process, how, mark, *([where] if kind else []))

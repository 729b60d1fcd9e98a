"""A step in a process of its own: what it answers, and what ends it."""

import fcntl
import json
import subprocess
import sys
import threading
import time

import psutil
import pytest

from benchmarks import apart

FOREVER = float("inf")
SLEEP = "import time; time.sleep(600)"
# A process below the one that is started, as a rank is below torchrun.
BELOW = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print(child.pid, flush=True)
child.wait()
"""
LOCK = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    print("ready", flush=True)
    fcntl.flock(file, fcntl.LOCK_EX)
"""


def run(code, until=FOREVER, limit=FOREVER, put_off=None, variables=None):
    command = [sys.executable, "-c", code]
    return apart.run(command, until, limit, put_off or threading.Event(), variables or {})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(apart, "POLL", 0.05)


def test_an_answer_is_the_last_object_among_what_nccl_prints():
    noise = "host:1:1 [0] NCCL INFO Bootstrap : Using eth0\\n"
    text = json.dumps({"seconds": 1})
    said = run(f"print({noise!r}); print({text!r}); print('[1, 2]'); print('3'); print({noise!r})")
    assert said == {"seconds": 1}


@pytest.mark.parametrize("text", ["", "  \n", "NCCL INFO", "[1]", '{"seconds": 1', "[" * 9999])
def test_what_is_no_answer_is_told_in_a_sentence(text):
    with pytest.raises(RuntimeError, match="^It gave no answer; the last that it printed is: "):
        apart.last_object(text)


def test_bytes_that_are_no_text_do_not_matter():
    code = "import sys; sys.stdout.buffer.write(bytes(range(128, 256)) + b'\\n{\"a\": 1}\\n')"
    assert run(code) == {"a": 1}


@pytest.mark.parametrize(
    "code, says",
    [
        ("raise SystemExit('no memory')", "^no memory$"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 and wrote no error"),
        ("raise SystemExit(3)", "ended with exit status 3 and wrote no error"),
        ("pass", "It gave no answer"),
    ],
)
def test_a_failure_is_a_sentence(code, says):
    with pytest.raises(RuntimeError, match=says):
        run(code)


def test_its_variables_are_set():
    code = "import json, os; print(json.dumps({'threads': os.environ['OMP_NUM_THREADS']}))"
    assert run(code, variables={"OMP_NUM_THREADS": "7"}) == {"threads": "7"}


def ended(raised, monkeypatch, **limits):
    """Run a process that has another below it and never ends; both must be gone afterwards."""
    family = []
    real = apart._family
    monkeypatch.setattr(apart, "_family", lambda pid: family.extend(real(pid)) or list(family))
    with pytest.raises(raised) as error:
        run(BELOW, **limits)
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert gone and not alive
    return str(error.value)


def test_a_step_that_works_too_long_is_ended_with_all_below_it(monkeypatch):
    said = ended(apart.Hung, monkeypatch, limit=1.0)
    assert said == "It was not done after 1 seconds of work, and was stopped."


def test_a_step_ends_with_the_call_and_where_others_come_first(monkeypatch):
    ended(TimeoutError, monkeypatch, until=time.monotonic())
    others = threading.Event()
    others.set()
    ended(apart.PutOff, monkeypatch, put_off=others)


def test_waiting_for_the_gpu_is_no_work(monkeypatch):
    """It waits for as long as it likes; of its work only what follows is counted."""
    looks = []

    def waits(pid):
        looks.append(pid)
        return len(looks) <= 20

    monkeypatch.setattr(apart, "waits", waits)
    with pytest.raises(apart.Hung):
        run(SLEEP, limit=1e-9)
    assert len(looks) == 21


@pytest.mark.skipif(not apart.LOCKS.exists(), reason="Only Linux lists who waits for a lock.")
def test_who_waits_for_a_lock_is_seen(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", LOCK, str(path)]
    above = f"import subprocess; subprocess.run({command!r})"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen([sys.executable, "-c", above], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        while not apart.waits(process.pid):
            assert process.poll() is None
            time.sleep(0.01)
    process.wait()
    assert not apart.waits(process.pid)


def test_where_nobody_says_who_waits_all_is_work(monkeypatch, tmp_path):
    monkeypatch.setattr(apart, "LOCKS", tmp_path / "missing")
    assert not apart.waits(1)

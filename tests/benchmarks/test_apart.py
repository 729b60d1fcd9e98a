"""A step in a process of its own: what it answers, and what ends it."""

import json
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


@pytest.mark.parametrize("text", ["", "[1]", '{"seconds": 1', "[" * 9999])
def test_what_is_no_answer_is_told_in_a_sentence(text):
    with pytest.raises(RuntimeError, match="^It gave no answer; the last that it printed is: "):
        apart.last_object(text)


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

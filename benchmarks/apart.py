"""A step in a process of its own: its answer, and an end to it where it hangs.

Steps that are prepared side by side wait for each other before they use the GPU
(`measure_step.alone_on_the_gpu`). This is no work of theirs, so it does not count for their limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

import psutil

from helpers import record

Task = TypeVar("Task")
Answer = TypeVar("Answer")
POLL = 0.5  # seconds between two looks at a step
KILL_SECONDS = 30.0  # that a killed process may take to go; one in the driver cannot be hurried
LOCKS = Path("/proc/locks")  # on Linux: who holds a file's lock, and who waits for one


class Hung(RuntimeError):
    """A step worked for longer than it may."""


class PutOff(Exception):
    """A step was ended because others come before it."""


def side_by_side(
    tasks: Sequence[Task],
    jobs: int,
    work: Callable[[Task], Answer],
    name_of: Callable[[Task], str],
    failed: dict[str, str],
    keep: Callable[[Task, Answer], str],
    save: Callable[[], object],
) -> list[tuple[Task, Exception]]:
    """Work on so many tasks at a time; each is kept and told of as soon as it is done or fails.

    work    gives a task's answer, and raises as `run`
    failed  {name of a task: why it failed}, of earlier calls too: one that is done now leaves it
    keep    takes an answer, and gives what is printed of it
    save    writes all that there is
    Returns the tasks that raised TimeoutError or PutOff, and what they raised.
    """
    lock = threading.Lock()
    undone: list[tuple[Task, Exception]] = []

    def one(task: Task) -> None:
        name = name_of(task)
        try:
            answer = work(task)
        except (TimeoutError, PutOff) as error:
            with lock:
                undone.append((task, error))
        except Exception as error:  # whatever it is, it may not cost the other tasks
            with lock:
                failed[name] = _sentence(error)
                save()
                print(f"    {name}: FAILED. {failed[name]}", flush=True)
        else:
            with lock:
                failed.pop(name, None)
                told = keep(task, answer)
                save()
                print(f"    {name}: {told}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, tasks))
    return undone


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, RuntimeError) else f"{type(error).__name__}: {text}"


def threads(jobs: int) -> dict[str, str]:
    """Variables of so many processes side by side: together they take half of the cores.

    The other half is left to the process that measures. An OMP_NUM_THREADS that is set stays.
    """
    each = max(1, (os.cpu_count() or 1) // 2 // jobs)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(each)}


def run(
    command: list[str],
    until: float,
    limit: float,
    put_off: threading.Event,
    variables: Mapping[str, str],
) -> dict:
    """Run a command to its end and give its answer, the last JSON object that it printed.

    until      the moment (time.monotonic) at which it is stopped
    limit      seconds that it may work, without its waiting for other steps
    put_off    ends it when it is set
    variables  of its environment, beside those of this process
    Raises TimeoutError at `until`, Hung after `limit`, PutOff, and RuntimeError, in one sentence,
    where it fails or gives no answer.
    """
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as wrong:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=wrong,
            cwd=record.RESULTS.parent,
            env={**os.environ, **variables},
        )
        try:
            _wait(process, until, limit, put_off)
        finally:
            _end(process)
        if process.returncode:
            lines = _text(wrong).strip().splitlines()
            raise RuntimeError(lines[-1][:300] if lines else _without_words(process.returncode))
        return last_object(_text(printed))


def _without_words(code: int) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return f"Its process {how} and wrote no error."


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf8", errors="replace")


def last_object(text: str) -> dict:
    """The last line that is a JSON object: NCCL and others print lines of their own around it.

    Raises RuntimeError, in one sentence, where there is none.
    """
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    last = (text.strip().splitlines() or ["nothing"])[-1][:200]
    raise RuntimeError(f"It gave no answer; the last that it printed is: {last}")


def _wait(process: subprocess.Popen, until: float, limit: float, put_off: threading.Event) -> None:
    worked, before = 0.0, time.monotonic()
    while True:
        try:
            process.wait(POLL)
            return
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if not waits(process.pid):
            worked += now - before
        before = now
        if now > until:
            raise TimeoutError
        if worked > limit:
            raise Hung(f"It was not done after {limit:g} seconds of work, and was stopped.")
        if put_off.is_set():
            raise PutOff


def waits(pid: int) -> bool:
    """Whether a process, or one that it started, waits for a file's lock.

    Where the system does not say so, it is False: waiting then counts as work.
    """
    try:
        lines = [line.split() for line in LOCKS.read_text(encoding="utf8").splitlines()]
    except OSError:
        return False
    waiting = {line[5] for line in lines if len(line) > 5 and line[1] == "->"}
    return bool(waiting) and any(str(member.pid) in waiting for member in _family(pid))


def _family(pid: int) -> list[psutil.Process]:
    """A process and all below it; empty where it has gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(process: subprocess.Popen) -> None:
    """Kill it and all below it, where it has not ended by itself."""
    if process.poll() is not None:
        return
    for member in _family(process.pid):
        try:
            member.kill()
        except psutil.NoSuchProcess:
            pass
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        pass

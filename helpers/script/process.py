"""The process in which a program is planned: a copy of this one, from which only facts come back.

The copy (`os.fork`) sees everything that is imported and defined here, and what it changes stays
its own. It ends at the last step of the plan without running anything else of the program: no
`finally`, no `atexit`, nothing that would save or push.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from helpers.gpus import VISIBLE
from helpers.script import program
from helpers.script.answer import Facts, facts_of
from helpers.script.program import Code, ProgramFailed, ProgramRun, Refused, TooLong, ToPlan
from helpers.script.steps import Watch

GRACE = 60.0  # seconds beside the limit, for what comes before and after the program
TAIL = 4000  # characters of a program's output that are kept
NO_COPY = (
    "PyTorch has started CUDA, or autograd's threads for a GPU, in this kernel, and no copy of "
    "such a process can compute gradients. Put the program into a file with "
    "%%writefile train.py, and plan it in a process of its own: "
    '!tight-fit script train.py --gpu "RTX 3060".'
)
COLLECTIONS = 3  # what one of them frees may have held more, as autograd's nodes do
PROBE_SECONDS = 30.0  # that the first gradient of a copy may take
SETTLE = 0.2  # seconds in which a thread for a GPU that cannot be used has ended the process


def plan(wanted: ToPlan, work: Code, seconds: float, shown: bool = False) -> Facts:
    """The facts of a program's plan (`answer.facts_of`).

    seconds  for which it may run
    shown    whether what the program prints is shown
    Raises Refused where it cannot be planned and ProgramFailed where it fails, in a sentence.
    """
    if not hasattr(os, "fork"):
        raise Refused("a program is planned in a copy of this process: use Linux, macOS or WSL.")
    if not copy_computes():
        raise Refused(NO_COPY)
    folder = Path(tempfile.mkdtemp(prefix="tight-fit-"))
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        os.close(read)
        _in_child(wanted, work, folder, write, seconds, shown)
    os.close(write)
    try:
        text = _read(read, seconds + GRACE)
    finally:
        os.close(read)
        _end(child)
        printed = _printed(folder)
        shutil.rmtree(folder, ignore_errors=True)
    if not text:
        raise ProgramFailed(
            "the program's process ended without an answer", printed.splitlines()[-5:]
        )
    told = json.loads(text)
    if "refused" in told:
        raise Refused(told["refused"])
    if "failed" in told:
        raise ProgramFailed(told["failed"], told["lines"])
    if told.get("nothing_on_gpu"):
        raise Refused(
            f"{'the cell' if wanted.cell else Path(wanted.script).name} puts nothing on the GPU: "
            "it trains on the CPU."
        )
    return told


def copy_computes() -> bool:
    """Whether autograd can go back in a copy of this process; tried in one that is thrown away.

    It cannot once autograd has threads for a GPU here. They start at the first backward pass: for
    each GPU that is here, or, in PyTorch's build for CUDA and without one, for those that
    `torch.compile` has pretended before. Nor can it once CUDA has been asked how many GPUs there
    are and has found some, as by `torch.cuda.is_available()`: the copy then takes them for its own.
    """
    child = os.fork()
    if not child:
        try:
            _redirect(Path(os.devnull))
            os.environ[VISIBLE] = ""
            torch.ones((), requires_grad=True).square().backward()
            time.sleep(SETTLE if torch.version.cuda else 0)
        except BaseException:
            os._exit(1)
        os._exit(0)
    end, ended, status = time.monotonic() + PROBE_SECONDS, 0, 1
    while not ended and time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0 if ended else 0.005)
    if not ended:
        _end(child)
    return bool(ended) and status == 0


def _read(pipe: int, seconds: float) -> str:
    """What the other process writes until it closes its end, "" where it takes too long."""
    parts, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        ready, _, _ = select.select([pipe], [], [], min(1.0, max(0.0, end - time.monotonic())))
        if ready:
            part = os.read(pipe, 1 << 20)
            if not part:
                break
            parts.append(part)
    return b"".join(parts).decode("utf8")


def _end(child: int) -> None:
    """Wait for a process that has answered; end one that has not."""
    for _ in range(50):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _printed(folder: Path) -> str:
    try:
        return (folder / "output").read_text(encoding="utf8", errors="replace")[-TAIL:]
    except OSError:
        return ""


def _in_child(
    wanted: ToPlan, work: Code, folder: Path, pipe: int, seconds: float, shown: bool
) -> NoReturn:
    """Run the program and leave the process with an answer on the pipe."""
    answer = _answerer(pipe)
    try:
        os.environ[VISIBLE] = ""  # what the program does to a GPU is only planned
        if not shown:
            _redirect(folder / "output")
        torch.set_num_threads(1)  # threads of the parent's are not there any more
        signal.signal(signal.SIGALRM, _alarm(seconds))
        for _ in range(COLLECTIONS):
            gc.collect()
        if not wanted.cell:  # a cell's models may be here already, and have to be found
            gc.freeze()  # what is here already is no garbage of the program's

        def timed() -> None:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            work()

        def finish(state: ProgramRun, watch: Watch) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            with torch._C.DisableTorchFunction():
                answer(facts_of(state, watch))

        program.run(wanted, folder, timed, finish)
    except Refused as error:
        answer({"refused": str(error)})
    except TooLong:  # while the program was ended
        answer({"refused": f"the program was still running after {seconds:g} seconds."})
    except ProgramFailed as error:
        answer({"failed": str(error), "lines": error.lines[-4:]})
    except KeyboardInterrupt:
        answer({"failed": "the program was interrupted", "lines": []})
    except BaseException as error:  # ours, or the program's in a place where none was expected
        import traceback

        lines = traceback.format_exception(error)[-6:]
        answer({"failed": f"{type(error).__name__}: {error}", "lines": lines})
    os._exit(1)


def _alarm(seconds: float) -> Callable[[int, Any], NoReturn]:
    def too_long(number: int, frame: Any) -> NoReturn:
        raise TooLong(seconds)

    return too_long


def _answerer(pipe: int) -> Callable[[dict[str, Any]], None]:
    write, leave = os.write, os._exit

    def answer(told: dict[str, Any]) -> None:
        data = json.dumps(told).encode()
        while data:
            data = data[write(pipe, data) :]
        leave(0)

    return answer


def _redirect(file: Path) -> None:
    """Let everything that is printed go to a file, that of compiled code too."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)

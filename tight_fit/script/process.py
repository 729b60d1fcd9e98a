"""The process in which a program is planned: a copy of this one, from which only facts come back.

The copy sees everything that is imported, defined and stored here, and what it changes stays its
own: the system isolates it (`tight_fit.isolation`), in namespaces, or else on a copy of its folder.
Where the system can do neither, a program runs only for a user who trusts it. It ends at the last
step of the plan without running anything else of the program: no `finally`, no `atexit`, nothing
that would save or push.
"""

from __future__ import annotations

import codecs
import gc
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from tight_fit import isolation
from tight_fit.gpus import VISIBLE
from tight_fit.script import program, sandbox
from tight_fit.script.clock import CLEAR, Clock, TooLong, say
from tight_fit.script.program import Code, ProgramFailed, ProgramRun, Refused, ToPlan
from tight_fit.script.program_facts import Facts, facts_of
from tight_fit.script.steps import Watch

SLOWEST = 10  # times as long a plan may take by the clock of a busy machine
GRACE = 60.0  # seconds beside the limit, for what comes before and after the program
AFTER = 60.0  # seconds for what a program does once its training is planned
TAIL = 4000  # bytes of a program's output that are kept
LONGEST = 1 << 26  # bytes of an answer that are read
# What terminals take for commands: nothing that a program says moves a cursor or names a window.
COMMANDS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]"
)
NO_COPY = (
    "PyTorch has started CUDA, or autograd's threads for a GPU, in this kernel, and no copy of "
    "such a process can compute gradients. Put the program into a file with "
    "%%writefile train.py, and plan it in a process of its own: "
    '!tight-fit script train.py --gpu "RTX 3060".'
)
COLLECTIONS = 3  # what one of them frees may have held more, as autograd's nodes do
NOT_ISOLATED = (
    "what the program writes cannot be kept apart here ({}): with --trust it runs all the same, "
    "and what it writes and sends until its plan is done is written and sent."
)
TRUSTED = "The program was trusted, not isolated ({}): what it wrote and sent is written and sent."
ON_COPY = (
    "The program ran on a copy of its folder, and could write nowhere else, as this system refuses "
    "{}."
)
FORBIDDEN = re.compile(r"Permission denied|not permitted|Read-only file system|readonly database")
NOT_IN_COPY = (
    "{}: {}; where this system refuses {}, a program can write to a copy of its folder alone: let "
    "it write to a path relative to that folder, or plan it with --trust."
)
LIMITS = {
    isolation.TOO_MANY: f": it started more than {isolation.TASKS:,} processes and threads",
    isolation.TOO_LARGE: ": it left this machine hardly any memory",
    isolation.TOO_FULL: ": it filled the disk of temporary files",
}
PROBE_SECONDS = 30.0  # that the first gradient of a copy may take
SETTLE = 0.2  # seconds in which a thread for a GPU that cannot be used has ended the process


def plan(
    wanted: ToPlan,
    work: Code,
    seconds: float,
    shown: bool = False,
    trust: bool = False,
    terminal: int | None = None,
) -> Facts:
    """The facts of a program's plan (`program_facts.facts_of`).

    seconds  of CPU time for which it may run
    shown    whether what the program prints is shown
    trust    whether it may run where nothing keeps apart what it writes
    terminal open file that is told each second what runs, which the program does not get
    Raises Refused where it cannot be planned and ProgramFailed where it fails, in a sentence.
    """
    if not hasattr(os, "fork"):
        raise Refused("a program is planned in a copy of this process: use Linux, macOS or WSL.")
    if not copy_computes():
        raise Refused(NO_COPY)
    answers, answer = os.pipe()
    printed, output = os.pipe()
    told, telling = os.pipe()  # the program is given no terminal, which takes commands and settings
    sys.stdout.flush()
    sys.stderr.flush()
    refused, on_copy, keep = "", False, (answer, output, telling)
    try:
        child = isolation.fork(keep)
    except isolation.Unavailable as error:
        refused, on_copy = str(error), not trust
        try:
            folder = os.path.dirname(os.path.abspath(wanted.script))
            child = isolation.fork_on_copy(keep, (folder,)) if on_copy else os.fork()
        except isolation.Unavailable as other:
            for pipe in (answers, answer, printed, output, told, telling):
                os.close(pipe)
            raise Refused(NOT_ISOLATED.format(f"{refused}; {other}")) from None
    if not child:
        os.close(answers)
        os.close(printed)
        os.close(told)
        clock = Clock(seconds, None if terminal is None else telling)
        _in_child(wanted, work, answer, output, clock, on_copy or not refused)
    os.close(answer)
    os.close(output)
    os.close(telling)
    output_of = Printed(printed, shown)
    try:
        text = _read(answers, [output_of, Heard(told, terminal)], SLOWEST * seconds + GRACE)
    finally:
        died = _end(child, isolation.end if on_copy else _kill)
        output_of.rest()
        for pipe in (answers, printed, told):
            os.close(pipe)
    try:
        facts = json.loads(text, object_hook=_plain)
        if not isinstance(facts, dict):
            raise ValueError("the program has written to the pipe of the answer")
    except (ValueError, RecursionError):
        lines = plain(output_of.tail.decode("utf8", "replace")).splitlines()[-5:]
        raise ProgramFailed(f"the program's process ended without an answer{died}", lines) from None
    if "refused" in facts:
        raise Refused(facts["refused"])
    if "failed" in facts and on_copy and FORBIDDEN.search(facts["failed"]):
        at = facts["lines"][-1].partition(" ")[0] if facts["lines"] else Path(wanted.script).name
        raise Refused(NOT_IN_COPY.format(at, facts["failed"], refused))
    if "failed" in facts:
        raise ProgramFailed(facts["failed"], facts["lines"])
    if facts.get("nothing_on_gpu"):
        raise Refused(
            f"{'the cell' if wanted.cell else Path(wanted.script).name} puts nothing on the GPU: "
            "it trains on the CPU."
        )
    if refused:
        facts["notes"].append((ON_COPY if on_copy else TRUSTED).format(refused))
    return facts


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
            _redirect(os.open(os.devnull, os.O_WRONLY))
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
        _kill(child)
    return bool(ended) and status == 0


class Printed:
    """What a program prints: its end is kept, and shown is what no terminal takes for a command."""

    def __init__(self, pipe: int, shown: bool):
        self.pipe, self.shown, self.tail = pipe, shown, b""
        self.text = codecs.getincrementaldecoder("utf8")("replace")

    def read(self) -> bool:
        """Read a part; False where there is none, and there will be none."""
        part = os.read(self.pipe, 1 << 20)
        self.tail = (self.tail + part)[-TAIL:]
        if self.shown:
            sys.stdout.write(plain(self.text.decode(part)))
            sys.stdout.flush()
        return bool(part)

    def rest(self) -> None:
        """Read what is left of a program that has ended, and waits in the pipe."""
        for _ in range(64):  # another process may go on writing, of a program that is trusted
            if not select.select([self.pipe], [], [], 0)[0] or not self.read():
                break


@dataclass(frozen=True)
class Heard:
    """What runs, as the program's process says it: a terminal is told in plain text."""

    pipe: int
    terminal: int | None

    def read(self) -> bool:
        """Read a part; False where there will be none."""
        part = os.read(self.pipe, 1 << 20)
        for text in part.decode("utf8", "replace").split(CLEAR)[1:]:
            say(self.terminal, " ".join(plain(text).split()))
        return bool(part)


def plain(text: str) -> str:
    """A text of a program's without what terminals take for commands."""
    return COMMANDS.sub("", text)


def _plain(told: dict[str, Any]) -> dict[str, Any]:
    def part(value: Any) -> Any:
        if isinstance(value, str):
            return plain(value)
        return [part(one) for one in value] if isinstance(value, list) else value

    return {plain(name): part(value) for name, value in told.items()}


def _read(answers: int, others: list[Printed | Heard], seconds: float) -> bytes:
    """The answer of the other process, empty where it takes too long or has no end."""
    parts: list[bytes] = []
    reads = {other.pipe: other.read for other in others}
    end, open_pipes = time.monotonic() + seconds, {answers, *reads}
    while answers in open_pipes and (left := end - time.monotonic()) > 0:
        for pipe in select.select(list(open_pipes), [], [], min(1.0, left))[0]:
            if pipe in reads:
                more = reads[pipe]()
            elif more := bool(part := os.read(pipe, 1 << 20)):
                parts.append(part)
            if not more:
                open_pipes.remove(pipe)
        if sum(map(len, parts)) > LONGEST:
            return b""
    return b"" if answers in open_pipes else b"".join(parts)


def _kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _end(child: int, kill: Callable[[int], object]) -> str:
    """Wait for a process that has answered, end one that has not, and give what it died of."""
    for _ in range(50):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.02)
    else:
        kill(child)
        return ""
    code = os.waitstatus_to_exitcode(status)
    if code in LIMITS:
        return LIMITS[code]
    number = -code if code < 0 else code - 128
    names = {one.value: one.name for one in signal.Signals}
    return f": it died of {names[number]}" if number in names else ""


def _in_child(
    wanted: ToPlan, work: Code, pipe: int, output: int, clock: Clock, isolated: bool
) -> NoReturn:
    """Run the program and leave the process with an answer on the pipe."""
    answer = _answerer(pipe)
    try:
        os.environ[VISIBLE] = ""  # what the program does to a GPU is only planned
        _redirect(output)
        torch.set_num_threads(1)  # threads of the parent's are not there any more
        for _ in range(COLLECTIONS):
            gc.collect()
        if not wanted.cell:  # a cell's models may be here already, and have to be found
            gc.freeze()  # what is here already is no garbage of the program's

        def timed() -> None:
            clock.start()
            work()

        def finish(state: ProgramRun, watch: Watch) -> None:
            clock.stop()
            with torch._C.DisableTorchFunction():
                answer(facts_of(state, watch))

        def began(state: ProgramRun, watch: Watch) -> None:
            clock.state = lambda frame: _doing(state, watch, frame)

        program.run(wanted, timed, finish, isolated, began, lambda: clock.at_most(AFTER))
    except Refused as error:
        clock.stop()
        answer({"refused": str(error)})
    except TooLong:  # while the program was ended
        answer({"refused": f"the program was still running after {clock.seconds:g} seconds."})
    except ProgramFailed as error:
        clock.stop()
        answer({"failed": str(error), "lines": error.lines[-4:]})
    except KeyboardInterrupt:
        answer({"failed": "the program was interrupted", "lines": []})
    except BaseException as error:  # ours, or the program's in a place where none was expected
        import traceback

        lines = traceback.format_exception(error)[-6:]
        answer({"failed": f"{type(error).__name__}: {sandbox.text_of(error)}", "lines": lines})
    os._exit(1)


def _doing(state: ProgramRun, watch: Watch, frame: FrameType | None) -> str:
    """What the program does now: its line, and which step."""
    line = state.code.line_of(frame) or Path(state.wanted.script).name
    if watch.over:
        return f"{line}, what comes after the training"
    if state.evaluation.under_way:
        return f"{line}, batch {state.evaluation.calls:,} of an evaluation"
    return f"{line}, step {len(watch.ends) + 1}"


def _answerer(pipe: int) -> Callable[[dict[str, Any]], None]:
    write, leave, own, asked = os.write, os._exit, os.getpid(), os.getpid

    def answer(told: dict[str, Any]) -> None:
        if asked() != own:  # in a copy that the program made of itself
            leave(1)
        data = json.dumps(told).encode()
        while data:
            data = data[write(pipe, data) :]
        leave(0)

    return answer


def _redirect(handle: int) -> None:
    """Let everything that is printed go to an open file, that of compiled code too."""
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)

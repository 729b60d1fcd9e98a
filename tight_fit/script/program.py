"""One run of a program under the plan: every mode and patch, from its first line to its end."""

from __future__ import annotations

import errno
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tight_fit.gpus import GPU
from tight_fit.layouts.trace import shapes_unseen
from tight_fit.script import changes, libraries, loaders, one_gpu, ranks, sandbox, saving
from tight_fit.script.clock import TooLong
from tight_fit.script.evaluation import Evaluation
from tight_fit.script.gpu_queries import Bytes, answered
from tight_fit.script.libraries import Notes
from tight_fit.script.steps import Watch
from tight_fit.script.values import ScriptCalls
from tight_fit.script.watch import ScriptTracker
from tight_fit.script.where import UserCode
from tight_fit.techniques.model_changes import as_if_real
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues
from tight_fit.trace.gpu_calls import Places, as_on_gpu
from tight_fit.trace.known_values import DependsOnValues, KnownValues
from tight_fit.trace.quantized import quantized_layers
from tight_fit.trace.tracker import steady_memory

Code = Callable[[], object]


# What an error says -> what to do about it.
KNOWN = (
    (
        "Attempting to unscale FP16 gradients",
        "Keep the trained weights in fp32 (dtype=torch.float32, or .float() for adapters): "
        "with fp16=True or autocast it is the computation that runs in fp16",
    ),
    (
        "element 0 of tensors does not require grad",
        "No trained weight reaches the loss: with frozen embeddings and checkpointing call "
        "model.enable_input_require_grads(), or give use_reentrant=False",
    ),
    (
        "fine-tuning on purely quantized models",
        "Train adapters instead: prepare_model_for_kbit_training(model), then get_peft_model",
    ),
    (
        "Using fsdp only works in distributed training",
        "Plan the model with tight-fit MODEL --layout fsdp=N for N GPUs",
    ),
    (
        "attempted relative import",
        "It is a module of a package: plan a file beside the package that holds import runpy; "
        'runpy.run_module("package.module", run_name="__main__")',
    ),
    (
        "`fused=True` requires all the params",
        "Move the model to the GPU before the optimizer is made, or leave fused=True out",
    ),
)


class Refused(ValueError):
    """The program cannot be planned; the message is one sentence."""


class ProgramFailed(RuntimeError):
    """The program itself failed; the message is its error, `lines` its own lines of traceback."""

    def __init__(self, message: str, lines: list[str]):
        super().__init__(message)
        self.lines = lines


@dataclass(frozen=True)
class ToPlan:
    """What is to be planned.

    script     the program's file, or the name that stands for a notebook's cells
    arguments  of the program
    gpu        the GPU it is told of; None for a machine without one, on which all tensors count
    steps      how many steps; None goes on until memory has settled
    change     what is changed about the step, as `changes.applied` knows it
    rank       of a program for torchrun; None for a program of one process
    cell       whether it is a notebook's cell
    """

    script: str
    arguments: tuple[str, ...] = ()
    gpu: GPU | None = None
    steps: int | None = None
    change: dict[str, Any] = field(default_factory=dict)
    cell: bool = False
    rank: ranks.ProgramRank | None = None


@dataclass
class ProgramRun:
    """What is at work while a program runs, for the answer that is made at its end."""

    wanted: ToPlan
    places: Places
    code: UserCode
    known: KnownValues
    tracker: ScriptTracker
    loaders: loaders.Loaders
    notes: Notes
    found: changes.Found
    gpu: one_gpu.OneGPU
    evaluation: Evaluation
    meter: ranks.Meter


def run(
    wanted: ToPlan,
    work: Code,
    finish: Callable[[ProgramRun, Watch], None],
    isolated: bool,
    began: Callable[[ProgramRun, Watch], None] = lambda state, watch: None,
    followed: Callable[[], None] = lambda: None,
) -> None:
    """Run `work`, the program, until `finish` is called at the end of its last step.

    `finish` must not return: it leaves the process. Raises Refused where the program ends before
    that, or cannot be planned, and ProgramFailed where it fails.

    isolated  whether what it writes goes with this process
    began     is called before the first line
    followed  is called once training is planned, and what comes after it is followed
    """
    places, notes = Places(), Notes()
    code = UserCode(wanted.script, wanted.cell)
    known = KnownValues(places, code.line)
    tracker = ScriptTracker(places, code)
    found = changes.Found()
    feeds = loaders.Loaders(wanted.change.get("accumulation", 1))
    state = ProgramRun(
        wanted,
        places,
        code,
        known,
        tracker,
        feeds,
        notes,
        found,
        one_gpu.OneGPU(places),
        Evaluation(tracker, known),
        ranks.Meter(tracker),
    )
    follows = isolated and wanted.steps is None  # else it would go on to save what has no values
    watch = Watch(
        tracker,
        feeds,
        lambda watch: finish(state, watch),
        wanted.steps,
        state.evaluation if follows else None,
        followed,
    )
    began(state, watch)
    try:
        with ExitStack() as stack:
            for context in _contexts(state, isolated):
                stack.enter_context(context)
            stack.enter_context(changes.applied(wanted.change, found, code.line, feeds.divide_by))
            stack.enter_context(watch.watching())
            stack.enter_context(state.evaluation.watching())
            stack.enter_context(steady_memory())
            stack.enter_context(shapes_unseen(tracker))
            stack.enter_context(tracker)
            if wanted.rank is not None:
                stack.enter_context(state.meter)
            work()
    except BaseException as error:  # a program may raise or exit in any way
        if watch.over:
            state.evaluation.stopped = _stopped(error, code)
            finish(state, watch)
        hint = "" if wanted.rank is not None or wanted.cell else ranks.hint(wanted.script)
        _explain(error, code, len(watch.ends), hint)
    if watch.over:
        finish(state, watch)
    if watch.ends:
        notes.add(
            f"The program ended by itself after {len(watch.ends)} steps, before its memory had "
            "settled: a longer run may take more."
        )
        finish(state, watch)
    raise Refused(
        f"{code.name_of(code.script)} ended without a step of an optimizer of torch.optim: there "
        "is no training to plan."
    )


def _contexts(state: ProgramRun, isolated: bool) -> Iterator[Any]:
    wanted, places, line = state.wanted, state.places, state.code.line
    on_gpu = wanted.gpu is not None
    yield ranks.one_of(wanted.rank, places, state.meter)
    yield sandbox.alone(isolated)
    yield libraries.adapted(state.notes, on_gpu, line, state.tracker)
    yield saving.kept(on_gpu, isolated)
    yield loaders.watched(state.loaders, line)
    yield as_if_real(convert=True)
    if wanted.gpu is not None:
        held = Bytes(state.tracker.held, state.tracker.forget_most)
        count = 1 if wanted.rank is None else wanted.rank.machine
        yield answered(wanted.gpu, held, state.gpu, line, count)
        yield one_gpu.only(state.notes.add, line)
        yield as_on_gpu(places)
    yield FakeTensorMode(allow_non_fake_inputs=True)
    yield FakeValues()
    yield state.known
    yield places
    flash = wanted.gpu is None or wanted.gpu.bf16
    calls = ScriptCalls(places, state.known, on_gpu, flash, state.gpu.take)
    state.found.attention = calls.attention
    yield calls
    yield quantized_layers(places)
    yield libraries.parameters_without_values(state.known)
    yield state.code.watching_modules()


def script_of(path: str, arguments: tuple[str, ...]) -> Code:
    """A program as a function: its file run as `python path arguments...` runs it."""

    def work() -> None:
        with _as_main(path, arguments):
            runpy.run_path(path, run_name="__main__")

    return work


@contextmanager
def _as_main(path: str, arguments: tuple[str, ...]) -> Iterator[None]:
    argv, places = sys.argv, sys.path
    sys.argv = [path, *arguments]
    sys.path = [str(Path(path).resolve().parent), *places]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, places


def _stopped(error: BaseException, code: UserCode) -> str:
    """Why what came after the training was not followed to its end, as the end of a sentence."""
    lines = _own_lines(error, code)
    at = f"{lines[-1].partition(' ')[0]}: " if lines else ""
    if isinstance(error, TooLong):
        return f"{at}it takes longer than {error.seconds:g} seconds"
    if isinstance(error, SystemExit):
        return ""
    return f"{at}{' '.join(str(error).split())[:200] or type(error).__name__}"


def _explain(error: BaseException, code: UserCode, steps: int, hint: str) -> None:
    """Raise Refused or ProgramFailed for what ended the program."""
    lines = _own_lines(error, code)
    at = lines[-1].partition(" ")[0] if lines else code.name_of(code.script)
    causes = [error, error.__cause__, error.__context__]
    if isinstance(error, (Refused, ProgramFailed)):
        raise error
    for cause in causes:
        if isinstance(cause, (sandbox.NotPlanned, DependsOnValues)):
            raise Refused(f"{at}: {_end(sandbox.text_of(cause), cause)}") from None
    if isinstance(error, TooLong):
        raise Refused(
            f"{at} was still running after {error.seconds:.3g} seconds of CPU time and {steps} "
            "steps: give more with --seconds, or see whether it ends or waits."
        ) from None
    name = type(error).__name__
    text = sandbox.text_of(error)
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, SystemExit):
        if error.code in (0, None):
            return
        raise ProgramFailed(
            f"the program exited with {error.code!r} before its first step{hint}", lines
        )
    inside = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    if any("deepspeed" in Path(file).parts for file in inside):
        raise Refused(
            f"{at} starts DeepSpeed, which is not planned: plan the model with tight-fit MODEL "
            "--layout fsdp=N for N GPUs, which shards what its ZeRO stage 3 does."
        ) from None
    if name == "GatedRepoError" or "gated repo" in text.lower():
        raise Refused(
            f"{at} needs a gated model: accept its terms on the hub and log in with `hf auth "
            "login`, or name a folder that has its config.json."
        ) from None
    if any(sandbox.needs_the_network(cause) for cause in causes):
        raise Refused(
            f"{at} needs what the hub's cache does not hold here, and a planned program reaches no "
            f"network: run it, or download that first ({text[:200]})."
        ) from None
    if any(getattr(cause, "errno", None) == errno.EOVERFLOW for cause in causes):
        raise Refused(
            f"{at} writes to a folder in one of another user or group, of which no copy can be "
            f"made: let it write to a folder of your own ({text[:200]})."
        ) from None
    if isinstance(error, NotImplementedError) or name == "UnsupportedOperatorException":
        raise Refused(f"{at} uses what is not planned: {_end(text or name)}") from None
    when = "before its first step" if not steps else f"after {steps} steps"
    hint = next((f". {todo}" for said, todo in KNOWN if said in text), hint)
    raise ProgramFailed(
        f"the program failed {when}: {name}: {text[:300].rstrip('.')}{hint}", lines
    ) from None


def _end(text: str, cause: BaseException | None = None) -> str:
    words = f"the program {text}" if isinstance(cause, sandbox.NotPlanned) else text
    return words if words.endswith(".") else f"{words}."


def _own_lines(error: BaseException, code: UserCode) -> list[str]:
    """The user's own lines of a traceback, as "train.py:84 in main: loss.backward()"."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        f"{code.name_of(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in frames
        if code.is_users(frame.filename)
    ]

"""The answer to a question of the command, as the facts that its text and its JSON are made from.

PyTorch and transformers are imported where a step has to be traced. A step whose trace is kept
(`command.kept_traces`) is answered without them, in a fraction of the time. Sizes are in bytes,
times in seconds.
"""

from __future__ import annotations

import ast
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

from tight_fit.command import notes, question
from tight_fit.command.kept_traces import KeptTraces
from tight_fit.command.question import Question
from tight_fit.command.report import option
from tight_fit.command.wrapper import importing
from tight_fit.gpus import GPU, GPUS
from tight_fit.gpus.names import of_size
from tight_fit.gpus.specs import SPECS, no_speed, speed_of
from tight_fit.memory.plan import Plan
from tight_fit.models import config as hf_config
from tight_fit.models.remembered import Remembered
from tight_fit.models.step import ModelStep
from tight_fit.search.remedies import Change, Remedies
from tight_fit.techniques.rules import GROUPED_SINCE

Facts = dict[str, Any]

# What would help beyond the techniques that are planned, said where those do not suffice.
# What the kernels of a GPU decide of a plan.
OF_PLAN = ("peak", "peak_phase", "at_peak", "flops")
NOT_PLANNED = ("offloading weights to main memory",)


class Answers:
    """Answers to questions about one step, which share their plans from GPU to GPU.

    say   is told in a few words what is being done
    kept  traces of earlier answers, which are made longer; None: every step is traced anew
    """

    def __init__(
        self,
        asked: Question,
        say: Callable[[str], object] = lambda words: None,
        kept: KeptTraces | None = None,
    ):
        self.asked, self.say, self.kept = asked, say, kept
        self.step = step_of(asked, kept)
        self.remedies = self._remedies(asked.gpu or GPUS["H100"])

    def _remedies(self, gpu: GPU) -> Remedies:
        return Remedies(self.step, gpu, self._tracing, kept=self.kept)

    def _tracing(self, change: Change) -> None:
        """A step is about to be traced."""
        if "tight_fit.plans.model" not in sys.modules:
            self.say("loading PyTorch and transformers")
            with importing():
                import tight_fit.plans.model  # noqa: F401
        self.say(_words(change))

    def _turn_to(self, gpu: GPU) -> None:
        if gpu != self.remedies.gpu:
            self.remedies = self.remedies.for_gpu(gpu)

    @property
    def _step(self) -> ModelStep:
        """The step with the kernels of the GPU that is being looked at."""
        return self.remedies.step

    def planned(self) -> Plan:
        """The plan of the step itself. Raises what `plans.model.plan_model` raises."""
        with quietly():
            return self.remedies.plan()

    def shared(self) -> Facts:
        """The facts that do not depend on the GPU."""
        plan, step, asked = self.planned(), self.step, self.asked
        kind = hf_config.kind_of(step.config, step.task or "")
        assert kind is not None, "checked when the step was made"
        return {
            "model": asked.name,
            "class": kind.name,
            "task": step.task,
            "task_named": hf_config.named_task(step.config),
            "parameters": plan.parameters,
            "weights": step.weights,
            "weights_stored": hf_config.weights_of(step.config),
            "stored_quantized": bool(getattr(step.config, "stored_quantized", False)),
            "batch_size": step.batch_size,
            "length": step.tokens,
            "image": list(step.image) if step.image else None,
            "precision": step.precision,
            "optimizer": step.optimizer,
            "checkpointing": step.checkpointing,
            "accumulation": step.accumulation,
            "lora_rank": step.lora_rank,
            "lora_targets": step.lora_targets,
            "base": step.base,
            "kbit": step.kbit,
            "attention": step.attention,
            "attention_taken": attention_of(step),
            "trainer_optimizer": self.kept.fact("trainer", trainer_optimizer)
            if self.kept
            else trainer_optimizer(),
            "loss": step.loss,
            "reference": step.compared_with,
            "completion": step.completion,
            "offload": step.offload,
            "optimizer_in_backward": step.optimizer_in_backward,
            **({"float8": step.float8} if step.float8 else {}),
            **({"compile": True} if step.compile else {}),
            "host": plan.host,
            "asked": asked.fields,
            "frozen": step.frozen,
            "peak": plan.peak,
            "peak_phase": plan.peak_phase,
            "at_peak": plan.at_peak,
            "flops": plan.flops,
            "planned_with": question.versions(),
        }

    def on(self, gpu: GPU | None) -> Facts:
        """Whether a GPU holds the step and how long it takes there; without one, which hold it."""
        if gpu is None:
            holds = {}
            for other in GPUS.values():
                if self.step.float8 and not other.fp8:
                    holds[other.name] = False
                    continue
                self._turn_to(other)
                holds[other.name] = bool(self.planned().fits(other))
            return {"cards": holds, "notes": notes.of_step(self.step, None)}
        self._turn_to(gpu)
        plan = self.planned()
        fit = plan.fits(gpu)
        own = {name: getattr(plan, name) for name in OF_PLAN} if not self._step.flash else {}
        return {
            **own,
            **vars(plan.allocator_peaks(gpu)),
            "card": gpu.name,
            "attention_fused": not _written_out(self._step),
            "card_memory": gpu.memory,
            "terms": fit.terms,
            "need": fit.need,
            "fits": bool(fit),
            "notes": notes.of_plan(self.step, plan, gpu, fit.need),
            **time_of(self.step, plan, gpu),
        }

    def advice(self, gpu: GPU) -> Facts:
        """The changes of the step that fit a GPU, and its largest batch."""
        self._turn_to(gpu)
        with quietly():
            changes, largest = self.remedies.changes(), self.remedies.largest_batch()
            fits = self.remedies.fits({})
            take = [self._with(change) for change in changes]
        facts: Facts = {"would_fit": changes, "would_take": take, "largest_batch": largest}
        if not fits and not changes:
            facts["not_planned"] = list(NOT_PLANNED)
        return facts

    def _with(self, change: Change) -> Facts:
        """What a step with a change needs of the GPU's memory, and the seconds that it takes."""
        gpu = self.remedies.gpu
        timed = speed_of(gpu.name) is not None
        plan = self.remedies.plan(change, traced=timed)
        took = time_of(replace(self.step, **change), plan, gpu) if timed else {"seconds": None}
        return {"need": plan.fits(gpu).need, "seconds": took["seconds"]}

    def fastest(self, gpu: GPU) -> Facts:
        """The fastest combination of techniques that fits a GPU, and its text."""
        from tight_fit.search.fastest import fastest

        with quietly():
            best = fastest(self.remedies)
        return {"fastest": vars(best), "fastest_lines": best.lines(gpu.name, option)}


def answers(
    asked: Question,
    say: Callable[[str], object] = lambda words: None,
    search: bool = False,
    fresh: bool = False,
) -> Iterator[Facts]:
    """The facts as far as they are known: without advice first, then with it.

    search  also for the fastest combination of techniques that fits
    fresh   from traces of its own, not from those that are kept
    Raises what `plans.model.plan_model` raises.
    """
    maker = Answers(asked, say, None if fresh else KeptTraces(asked.values))
    facts = maker.shared() | maker.on(asked.gpu)
    yield facts
    if asked.gpu is not None and not asked.quick:
        facts |= maker.advice(asked.gpu)
        if search:
            facts |= maker.fastest(asked.gpu)
        yield facts


def attention_of(step: ModelStep) -> str | None:
    """ "sdpa" or "eager": what is asked for, or what the library takes; None without attention."""
    kind = hf_config.kind_of(step.config, step.task or "")
    text = hf_config.text_config(step.config)
    if not hasattr(text, "num_attention_heads"):
        return None
    return step.attention or ("sdpa" if kind is not None and kind.sdpa else "eager")


def _written_out(step: ModelStep) -> bool:
    """Whether the GPU that `ModelStep.on` was told of has no fused kernel for a step's attention.

    With grouped queries FlashAttention's kernel is the only one before PyTorch 2.14, and it
    computes in 16 bits (`trace.cuda_kernels`).
    """
    release = tuple(map(int, question.versions()["torch"].split(".")[:2]))
    low = {"bf16", "fp16"} & {step.precision, step.weights}
    if step.flash and low:
        return False
    return "bf16" in low or (step.grouped and release < GROUPED_SINCE)


def trainer_optimizer() -> str:
    """What `optim` of TrainingArguments is where nothing is said, in the installed transformers.

    The lines of its source that decide it are run, as importing the module takes seconds.
    """
    found = util.find_spec("transformers")
    file = Path(found.origin).with_name("training_args.py") if found and found.origin else None
    text = file.read_text(encoding="utf8") if file and file.exists() else ""
    decided: list[ast.stmt] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            decided = [part for part in node.body if "default_optim =" in ast.unparse(part)]
    names: dict[str, Any] = {"__package__": "transformers", "is_torch_available": lambda: True}
    exec(compile(ast.Module(decided, []), "<transformers>", "exec"), names)
    return names.get("default_optim", "")


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, neither PyTorch nor transformers print accounts of what ends in our own sentence.

    Of transformers that holds where it is imported already, and while steps are traced.
    """
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        if "transformers" in sys.modules:
            with importing():
                from tight_fit.techniques import model_changes

            stack.enter_context(model_changes.quiet())
        warnings.simplefilter("ignore")
        yield


def _config_of(asked: Question) -> hf_config.PretrainedConfig:
    with importing():
        import transformers  # noqa: F401  # before `quietly`, which then silences it

        from tight_fit.models import odd  # noqa: F401  # with what it imports

    with quietly():
        return hf_config.from_values(asked.values, asked.name)


def step_of(asked: Question, kept: KeptTraces | None = None) -> ModelStep:
    """The step that a question is about; `kept` may know what its configuration says.

    Weights of 16 bits are trained with autocast of the same dtype where no precision was given.
    """
    if kept:
        facts = kept.fact("config", lambda: hf_config.remember(_config_of(asked)).facts)
        config: hf_config.Config = Remembered(facts, asked.values, asked.name)
    else:
        config = _config_of(asked)
    with quietly():
        fields = {"batch_size": question.BATCH, **asked.fields}
        if "precision" in fields:
            return ModelStep(config, **fields)
        step = ModelStep(config, **fields)
        assert step.weights is not None, "set when the step was made"
        return ModelStep(config, **fields, precision=step.weights)


def _words(change: Change) -> str:
    if not change:
        return "planning the step"
    return "trying " + " ".join(
        f"--{name.replace('_', '-').removesuffix('-size')}" + ("" if value is True else f" {value}")
        for name, value in change.items()
    )


def time_of(step: ModelStep, plan: Plan, gpu: GPU) -> Facts:
    """How long the step takes on a GPU.

    seconds, seconds_low, seconds_high  of a step, with the interval
    seconds_by_phase                    {phase: seconds}
    examples_per_second, tokens_per_second, mfu
    kernels_measured_on                 the GPU whose measured kernels stand for those of this one
    calibrated                          when tight-fit calibrate measured this GPU, where it did
    no_time                             why there are no seconds; then "seconds" is None, and of a
                                        GPU given by its size there is
    seconds_by_gpu                      {GPU of that size: seconds} of those that can run the step
    """
    if speed_of(gpu.name) is None:
        return {"seconds": None, "no_time": no_speed(gpu)} | _by_gpu(plan, gpu)
    try:
        took = plan.seconds(gpu)
        arithmetic = step.precision
        if arithmetic == "fp32":
            arithmetic = step.weights or "fp32"
        mfu = took.mfu("fp32" if arithmetic == "tf32" and not took.gpu.tf32 else arithmetic)
    except ValueError as error:
        return {"seconds": None, "no_time": str(error)}
    by_user = took.gpu.rates is not None and took.gpu != SPECS.get(took.gpu.name)
    rate = step.batch_size / took.total
    return {
        "seconds": took.total,
        "seconds_low": took.low,
        "seconds_high": took.high,
        "seconds_by_phase": took.phases,
        "examples_per_second": rate,
        "tokens_per_second": rate * step.sequences * step.tokens if step.tokens else None,
        "mfu": mfu,
        "kernels_measured_on": took.gpu.name if took.gpu.rates else took.gpu.like,
    } | ({"calibrated": took.gpu.rates.date} if by_user and took.gpu.rates else {})


def _by_gpu(plan: Plan, gpu: GPU) -> Facts:
    found = {}
    for likely in of_size(gpu):
        with suppress(ValueError):  # it lacks an arithmetic of the step
            found[likely.name] = plan.seconds(likely).total
    return {"seconds_by_gpu": found} if found else {}

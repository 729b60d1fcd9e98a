"""The fastest way to take a step on a GPU that holds it, found by planning, with a reason for each
change.

What is tried changes how the step is computed, not what is learnt: half precision or TF32 where the
GPU has them, more micro-batches, gradient checkpointing, the loss of a language model in chunks,
8-bit AdamW, whose states are rounded, and 4 bits for weights that are frozen beside adapters. LoRA
itself and freezing train other weights, and are left out. Examples per
step, their length and the model stay as they are.

More micro-batches, checkpointing, chunks and 4 bits never make a step faster. So of each
combination only the fewest micro-batches that fit are timed, and what only saves memory is not
added to a combination that fits without it. Combinations within `TIE` of the fastest are a tie, in
which the one with the fewest changes wins.

The optimizer or the activations on the host are tried last, only where nothing fits without: they
wait for the link and for the CPU, and are nearly always slower. Their seconds are planned for a
usual host (`kernels.host_memory`); another CPU or link takes another time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tight_fit.gpus.specs import find_gpu, has_arithmetic
from tight_fit.kernels.step_seconds import lacks
from tight_fit.memory.plan import Plan
from tight_fit.models.config import LANGUAGE_MODELS
from tight_fit.models.step import ModelStep
from tight_fit.optimizer_kinds import ADAMW, ON_HOST
from tight_fit.search.remedies import Change, Remedies
from tight_fit.units import duration, size

SAVES = {"loss", "checkpointing", "base"}  # fields whose changes save memory and never time
CHUNKED: Change = {"loss": "chunked"}
FOUR_BITS: Change = {"base": "nf4"}
CHECKPOINTING: Change = {"checkpointing": True}
SAVERS: tuple[Change, ...] = tuple(
    {**saver, **optimizer}
    for saver in (
        {},
        CHUNKED,
        CHECKPOINTING,
        CHUNKED | CHECKPOINTING,
        CHUNKED | FOUR_BITS,
        CHUNKED | CHECKPOINTING | FOUR_BITS,
    )
    for optimizer in ({}, {"optimizer": "adamw8bit"})
)
OFFLOADS: tuple[Change, ...] = ({"offload": "activations"}, {"offload": "optimizer"})
TIE = 0.05  # of the time of a step; a plan cannot tell smaller differences
WORDS = {
    "loss": "the loss in chunks",
    "checkpointing": "checkpointing",
    "base": "weights in 4 bits",
    "optimizer": "8-bit AdamW",
    "offload": "optimizer or activations on the host",
}
# Whole plans of one search, and of one with offload; a model's last combinations are left out
# beyond them.
MOST_PLANS = 48


@dataclass(frozen=True)
class Fastest:
    """What the search found.

    change   {field: new value} of the step; {} where it is fastest as it is, None if nothing fits
    seconds  of a step with it; None if nothing fits
    reasons  {changed field: a sentence on why}
    tried    the combinations that were planned or bounded, in words
    left     combinations that were not looked at because of `MOST_PLANS`
    fields   what else than precision and micro-batches was tried: keys of `WORDS`
    """

    change: Change | None
    seconds: float | None
    reasons: dict[str, str]
    tried: int
    left: int
    fields: tuple[str, ...] = ("checkpointing", "optimizer")

    def lines(self, gpu: str, option) -> list[str]:
        """As the command prints it; `option(field, value)` gives a change as it is typed."""
        searched = (
            f"Searched: precision, micro-batches, {_and(self.fields)}, {self.tried} "
            f"combinations by plan, of those within {TIE:.0%} of each other the simplest; not LoRA "
            "and freezing, which train other weights."
        )
        if self.left:
            searched += f" {self.left} more were left out to bound the time."
        if self.change is None or self.seconds is None:
            return [f"No combination fits the {gpu}.", searched]
        typed = " ".join(option(*pair) for pair in self.change.items()) or "the step as asked"
        took = f"{duration(self.seconds)} a step"
        lines = [f"The fastest that fits the {gpu}: {typed}, {took}."]
        lines += [
            f"  {option(name, self.change[name])}: {why}" for name, why in self.reasons.items()
        ]
        return [*lines, searched]


def fastest(remedies: Remedies) -> Fastest:
    """The fastest combination that the GPU of `remedies` holds, for its step.

    >>> from tight_fit import ModelStep, Remedies, fastest
    >>> step = ModelStep.of("distilroberta-base", batch_size=64, length=128)
    >>> fastest(Remedies(step, "T4")).change
    {'precision': 'fp16'}

    Raises ValueError for a GPU whose speed is not known, and what `Remedies.plan` raises for the
    step as it is.
    """
    find_gpu(remedies.gpu)
    remedies.plan()
    search = _Combinations(remedies)
    search.through(SAVERS, MOST_PLANS)
    if not search.times and _can_offload(remedies):
        combinations = [offload | saver for offload in OFFLOADS for saver in SAVERS]
        search.through(combinations, remedies.planned + MOST_PLANS)
    fields = tuple(name for name in WORDS if any(name in change for change in search.looked))
    tried, left = len(search.looked), search.left
    if not search.times:
        return Fastest(None, None, {}, tried, left, fields)
    limit = (1 + TIE) * min(seconds for seconds, _ in search.times)
    within = [entry for entry in search.times if entry[0] <= limit]
    seconds, best = min(within, key=lambda entry: (len(entry[1]), entry[0]))
    return Fastest(best, seconds, _reasons(remedies, best, seconds), tried, left, fields)


class _Combinations:
    """What was looked at: `times` holds (seconds, change) of each combination that fits, `looked`
    the combinations that were planned or bounded; `left` counts those without a plan left."""

    def __init__(self, remedies: Remedies):
        self.remedies = remedies
        self.times: list[tuple[float, Change]] = []
        self.looked: list[Change] = []
        self.left = 0

    def through(self, savers: Sequence[Change], most: int) -> None:
        """Look at each of the savers with each precision, until `most` plans have been made."""
        remedies = self.remedies
        for precision in _precisions(remedies):
            enough: list[Change] = []  # with which no more memory need be saved
            for saver in savers:
                change = _applied(remedies, precision | saver)
                if change is None or any(_only_saves(saver, fitting) for fitting in enough):
                    continue
                if remedies.planned >= most:
                    self.left += 1
                    continue
                self.looked.append(change)
                found = _fewest_micro_batches(remedies, change)
                if found is None:
                    continue
                self.times.append((_seconds(remedies, found), found))
                if "accumulation" not in found:
                    enough.append(saver)


def _can_offload(remedies: Remedies) -> bool:
    step = remedies.step
    return step.offload is None and remedies.device == "cuda" and isinstance(step, ModelStep)


def _and(names: Sequence[str]) -> str:
    words = [WORDS[name] for name in names]
    return " and ".join(([", ".join(words[:-1])] if words[:-1] else []) + words[-1:])


def _precisions(remedies: Remedies) -> Iterator[Change]:
    """The step's own precision and the faster ones of the GPU, from the fastest on."""
    gpu, own = remedies.gpu, remedies.step.precision
    if own in ("fp32", "tf32"):
        half = "bf16" if gpu.bf16 else "fp16"
        if has_arithmetic(half, gpu):
            yield {"precision": half}
        if own == "fp32" and find_gpu(gpu).tf32:
            yield {"precision": "tf32"}
    if has_arithmetic(own, gpu):
        yield {}
    elif instead := remedies.runnable({}):  # fp16 where bf16 was asked for and is not there
        yield instead


def _only_saves(saver: Change, fitting: Change) -> bool:
    """Whether a combination is another one and what saves memory alone."""
    more = {name: value for name, value in saver.items() if name not in fitting}
    return bool(more) and set(more) <= SAVES and fitting.items() <= saver.items()


def _applied(remedies: Remedies, change: Change) -> Change | None:
    """The change without what the step has already; None where that is the same as without it."""
    step = remedies.step
    if "optimizer" in change and (step.optimizer not in ADAMW or step.lora_rank is not None):
        return None  # states of adapters are small
    if change.get("offload") == "optimizer" and (
        change.get("optimizer", step.optimizer) not in ON_HOST or step.lora_rank is not None
    ):
        return None  # the CPU does not update 8-bit states, and those of adapters are small
    if "checkpointing" in change and step.checkpointing:
        return None
    if "loss" in change and (
        getattr(step, "loss", None) != "full" or step.task not in LANGUAGE_MODELS
    ):
        return None
    if "base" in change and (step.lora_rank is None or not remedies.four_bits()):
        return None
    return {name: value for name, value in change.items() if getattr(step, name) != value}


def _fewest_micro_batches(remedies: Remedies, change: Change) -> Change | None:
    """The change with the fewest micro-batches, from the step's own on, that fit; None if none
    do."""
    step = remedies.step
    for number in range(step.accumulation, step.batch_size + 1):
        if step.batch_size % number:
            continue
        more: Change = {} if number == step.accumulation else {"accumulation": number}
        if remedies.fits(change | more):
            return change | more
    return None


def _seconds(remedies: Remedies, change: Change) -> float:
    return remedies.plan(change, traced=True).seconds(remedies.gpu).total


def _reasons(remedies: Remedies, best: Change, seconds: float) -> dict[str, str]:
    """Why each change is there: what the step would be like without it."""
    reasons = {}
    for name in best:
        without = {other: value for other, value in best.items() if other != name}
        planned: Plan = remedies.plan(without, traced=True)
        fit = planned.fits(remedies.gpu)
        took = planned.seconds(remedies.gpu).total if _can_run(remedies, without) else None
        sentences = []
        if not fit:
            sentences.append(f"without it the GPU has {size(fit.over)} too little")
        if took is not None:
            ratio = f"{duration(took)} without it"
            sentences.append(f"{ratio}, {took / seconds:.2f} times as long")
        reasons[name] = "; ".join(sentences) + "."
    return reasons


def _can_run(remedies: Remedies, change: Change) -> bool:
    operations = remedies.plan(change, traced=True).operations
    return operations is not None and not lacks(operations, remedies.gpu)

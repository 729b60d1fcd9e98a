"""The smallest changes with which a program fits, each tried by another run of the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tight_fit.gpus import GPU
from tight_fit.packages import missing
from tight_fit.script.changes import ADAMS
from tight_fit.script.program import ProgramFailed, Refused

Facts = dict[str, Any]
Change = dict[str, Any]
Plan = Callable[[Change], Facts]


@dataclass(frozen=True)
class Remedy:
    """A change of the program that was planned.

    words  what to write, in the words of the program
    need   bytes that it then needs on the GPU
    """

    change: Change
    words: str
    need: int
    fits: bool


def find(facts: Facts, gpu: GPU, plan: Plan) -> list[Remedy]:
    """The remedies that were tried, those that fit first.

    Single changes come first; where none of them fits, all together are tried, and those that are
    not needed are left out again. `plan` plans the program with a change, and raises Refused or
    ProgramFailed where it cannot.
    """
    single = []
    if not missing("bitsandbytes"):
        import bitsandbytes  # noqa: F401  # its layers have to be known before a program runs
    smallest = _smallest_accumulation(facts, plan)
    if smallest is not None:
        single.append(smallest)
    for change in _others(facts, gpu):
        remedy = _tried(facts, plan, change)
        if remedy is not None:
            single.append(remedy)
    if any(remedy.fits for remedy in single):
        return sorted(single, key=lambda remedy: not remedy.fits)
    return _together(facts, plan, single) or single


def _others(facts: Facts, gpu: GPU) -> list[Change]:
    found = facts["found"]
    changes: list[Change] = []
    if facts["evaluation"]["peak"] > facts["evaluation"]["training"] and found["trainer"]:
        changes.append({"evaluation": 1})
    if not found["autocast"]:
        changes.append({"precision": "bf16" if gpu.bf16 else "fp16"})
    if set(facts["optimizers"]) & set(ADAMS) and not missing("bitsandbytes"):
        changes.append({"optimizer": "adamw8bit"})
    if not found["checkpoints"]:
        changes.append({"checkpointing": True})
    return changes


def _tried(facts: Facts, plan: Plan, change: Change) -> Remedy | None:
    """The remedy of a change; None where the program does not take it."""
    try:
        changed = plan(change)
    except (Refused, ProgramFailed):
        return None
    if set(change) - set(changed["found"]["took"]):
        return None
    return Remedy(change, worded(facts, change), changed["need"], changed["fits"])


def _smallest_accumulation(facts: Facts, plan: Plan) -> Remedy | None:
    """The fewest micro-batches that fit, or the most that there are; None where there are none."""
    size = facts["found"]["settings"].get("per_device_train_batch_size") or facts["batch_size"]
    if not isinstance(size, int):
        return None
    last = None
    activations = facts["at_peak"]["activations"]
    for parts in (parts for parts in (2, 4, 8, 16, 32, 64) if size % parts == 0):
        least = facts["peak"] - activations + activations // parts
        if least > facts["card_memory"] and size % (2 * parts) == 0:
            continue
        remedy = _tried(facts, plan, {"accumulation": parts})
        if remedy is None:
            return last
        last = remedy
        if remedy.fits:
            return remedy
    return last


def _together(facts: Facts, plan: Plan, single: list[Remedy]) -> list[Remedy]:
    """One change of several parts that fits, none of which can be left out; none if none does."""
    change: Change = {}
    best = None
    for remedy in sorted(single, key=lambda remedy: remedy.need):
        change |= remedy.change
        best = _tried(facts, plan, change) if len(change) > 1 else remedy
        if best is not None and best.fits:
            break
    if best is None or not best.fits:
        return []
    for name in list(change):
        fewer = {other: value for other, value in change.items() if other != name}
        without = _tried(facts, plan, fewer) if len(fewer) > 1 else None
        if without is not None and without.fits:
            change, best = fewer, without
    return [best]


def worded(facts: Facts, change: Change) -> str:
    """A change as it is written in this program."""
    return ", ".join(_word(facts, name, value) for name, value in change.items())


def _word(facts: Facts, name: str, value: Any) -> str:
    found = facts["found"]
    if found["trainer"]:
        pairs = _arguments(found["settings"], name, value)
        if found["parses"]:
            return " ".join(
                f"--{key}" if given is True else f"--{key} {given}" for key, given in pairs
            )
        given = ", ".join(f"{key}={value!r}" for key, value in pairs)
        return f"{found['trainer']}: TrainingArguments({given})"
    if name == "accumulation":
        size = facts["batch_size"] // value
        return (
            f"{facts['loader']}: batch_size={size}, and the optimizer's step and zero_grad only "
            f"after every {value} batches, with the loss divided by {value}"
        )
    if name == "precision":
        scaler = " and torch.amp.GradScaler" if value == "fp16" else ""
        kind = "bfloat16" if value == "bf16" else "float16"
        return f'torch.autocast("cuda", torch.{kind}) around the forward pass{scaler}'
    if name == "optimizer":
        return f"{found['optimizer']}: bitsandbytes.optim.AdamW8bit instead of {_adam(facts)}"
    return "model.gradient_checkpointing_enable() before the training"


def _adam(facts: Facts) -> str:
    return next((kind for kind in facts["optimizers"] if kind in ADAMS), "AdamW")


def _arguments(settings: dict[str, Any], name: str, value: Any) -> list[tuple[str, Any]]:
    if name == "accumulation":
        return [
            ("per_device_train_batch_size", settings["per_device_train_batch_size"] // value),
            ("gradient_accumulation_steps", settings["gradient_accumulation_steps"] * value),
        ]
    if name == "precision":
        return [(value, True)]
    if name == "evaluation":
        return [("eval_accumulation_steps", value)]
    if name == "optimizer":
        return [("optim", "adamw_bnb_8bit")]
    return [("gradient_checkpointing", True)]

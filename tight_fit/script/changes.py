"""What is changed about the step of a program when a remedy is tried, and what the program uses.

The changes are those of `plan.remedies`: fewer examples at a time, mixed precision, 8-bit AdamW,
gradient checkpointing. With transformers' Trainer each is an argument of `TrainingArguments`; in a
loop of the program's own each is done to the library that the loop calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing
from transformers import HfArgumentParser, PreTrainedModel, TrainingArguments

from tight_fit.techniques.precision import AUTOCAST

ADAMS = ("AdamW", "Adam")
SHARED = ("lr", "betas", "eps", "weight_decay")  # arguments that both kinds of AdamW take
Line = Callable[[], str]


@dataclass
class Found:
    """What is found out about a program while it runs.

    trainer       line of its `TrainingArguments`, "" without Trainer
    parses        whether those come from the command line (`HfArgumentParser`)
    settings      what they say of the step
    autocast      the dtype of its autocast, "" without
    checkpoints   whether it recomputes activations
    optimizer     line at which the optimizer was made
    attention     {dtype of attention: whether the GPU has one kernel for it}
    took          names of the changes that took effect
    """

    trainer: str = ""
    parses: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    autocast: str = ""
    checkpoints: bool = False
    optimizer: str = ""
    attention: dict[str, bool] = field(default_factory=dict)
    took: set[str] = field(default_factory=set)
    scheduled: set[int] = field(default_factory=set)


@contextmanager
def applied(
    change: dict[str, Any], found: Found, line: Line, divide: Callable[[int], None]
) -> Iterator[None]:
    """Inside, a program's step has the change, and `found` is filled.

    divide  is told by how much loaders are to divide their batches
    """
    with ExitStack() as stack:
        stack.enter_context(_arguments(change, found, line, divide))
        stack.enter_context(_noticed(found))
        stack.enter_context(_optimizers(change, found, line))
        if {"precision", "checkpointing"} & set(change):
            stack.enter_context(_around_models(change, found))
        yield


@contextmanager
def _arguments(
    change: dict[str, Any], found: Found, line: Line, divide: Callable[[int], None]
) -> Iterator[None]:
    kind, parser = TrainingArguments, HfArgumentParser
    finish, parse = kind.__post_init__, parser.parse_args_into_dataclasses

    def finished(arguments):
        found.trainer = line() or "the program"
        parts = change.get("accumulation", 1)
        divide(1)
        if parts > 1 and arguments.per_device_train_batch_size % parts == 0:
            arguments.per_device_train_batch_size //= parts
            arguments.gradient_accumulation_steps = (
                int(arguments.gradient_accumulation_steps) * parts
            )
            found.took.add("accumulation")
        if "evaluation" in change and not arguments.eval_accumulation_steps:
            arguments.eval_accumulation_steps = change["evaluation"]
            found.took.add("evaluation")
        if "precision" in change and not (arguments.bf16 or arguments.fp16):
            setattr(arguments, change["precision"], True)
            found.took.add("precision")
        if "optimizer" in change and "adamw" in str(arguments.optim):
            arguments.optim = "adamw_bnb_8bit"
            found.took.add("optimizer")
        if "checkpointing" in change and not arguments.gradient_checkpointing:
            arguments.gradient_checkpointing = True
            arguments.gradient_checkpointing_kwargs = {"use_reentrant": False}
            found.took.add("checkpointing")
        arguments.dataloader_num_workers = 0
        arguments.dataloader_persistent_workers = False
        arguments.dataloader_prefetch_factor = None
        finish(arguments)
        found.settings = {
            name: getattr(arguments, name)
            for name in (
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "bf16",
                "fp16",
                "gradient_checkpointing",
            )
        }
        found.settings["optim"] = str(getattr(arguments.optim, "value", arguments.optim))

    def parsed(self, *args, **kwargs):
        found.parses = True
        return parse(self, *args, **kwargs)

    with (
        patch.object(kind, "__post_init__", finished),
        patch.object(parser, "parse_args_into_dataclasses", parsed),
    ):
        yield


@contextmanager
def _noticed(found: Found) -> Iterator[None]:
    """What of the techniques the program uses already."""
    make, recompute = torch.autocast.__init__, checkpointing.checkpoint
    enable = PreTrainedModel.gradient_checkpointing_enable

    def made(context, device_type, dtype=None, enabled=True, cache_enabled=None):
        if enabled and not found.took & {"precision"}:
            found.autocast = str(dtype or torch.get_autocast_dtype(device_type))
        make(context, device_type, dtype, enabled, cache_enabled)

    def noted(*args, **kwargs):
        found.checkpoints = True
        return recompute(*args, **kwargs)

    def enabled(model, *args, **kwargs):
        found.checkpoints = True
        return enable(model, *args, **kwargs)

    with (
        patch.object(torch.autocast, "__init__", made),
        patch.object(checkpointing, "checkpoint", noted),
        patch.object(PreTrainedModel, "gradient_checkpointing_enable", enabled),
    ):
        yield


@contextmanager
def _optimizers(change: dict[str, Any], found: Found, line: Line) -> Iterator[None]:
    make = torch.optim.Optimizer.__init__
    parts = change.get("accumulation", 1)

    def made(optimizer, *args, **kwargs):
        make(optimizer, *args, **kwargs)
        found.optimizer = line() or found.optimizer
        if parts > 1 and not found.trainer:
            _step_seldom(optimizer, parts)

    with ExitStack() as patches:
        patches.enter_context(patch.object(torch.optim.Optimizer, "__init__", made))
        if change.get("optimizer") == "adamw8bit":
            from bitsandbytes.optim import AdamW8bit

            def small(parameters, *args, **kwargs):
                found.took.add("optimizer")
                taken = {name: kwargs[name] for name in SHARED if name in kwargs}
                return AdamW8bit(parameters, *args[:1], **taken)

            for name in ADAMS:
                patches.enter_context(patch.object(torch.optim, name, small))
        yield


def _step_seldom(optimizer: Any, parts: int) -> None:
    """Let only each `parts`-th step and the call of `zero_grad` after it do something."""
    step, zero, calls = optimizer.step, optimizer.zero_grad, [0]

    def seldom(self, *args, **kwargs):
        calls[0] += 1
        return step(*args, **kwargs) if calls[0] % parts == 0 else None

    def zero_after(self, *args, **kwargs):
        return zero(*args, **kwargs) if calls[0] % parts == 0 else None

    # Schedules look for the function below a bound method.
    optimizer.step = MethodType(seldom, optimizer)
    optimizer.zero_grad = MethodType(zero_after, optimizer)


@contextmanager
def _around_models(change: dict[str, Any], found: Found) -> Iterator[None]:
    """Autocast around each outermost module that trains, and checkpointing switched on in it."""
    call = nn.Module.__call__
    depth = [0]

    def around(module, *args, **kwargs):
        outermost = depth[0] == 0 and module.training and torch.is_grad_enabled()
        if outermost and "checkpointing" in change and not found.trainer:
            _recompute(module, found)
        depth[0] += 1
        try:
            if outermost and "precision" in change and not found.trainer:
                found.took.add("precision")
                with torch.autocast("cuda", AUTOCAST[change["precision"]]):
                    return call(module, *args, **kwargs)
            return call(module, *args, **kwargs)
        finally:
            depth[0] -= 1

    with patch.object(nn.Module, "__call__", around):
        yield


def _recompute(module: nn.Module, found: Found) -> None:
    if id(module) in found.scheduled:
        return
    found.scheduled.add(id(module))
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and part.supports_gradient_checkpointing:
            part.gradient_checkpointing_enable({"use_reentrant": False})
            if hasattr(part.config, "use_cache"):
                part.config.use_cache = False
            found.took.add("checkpointing")
            return

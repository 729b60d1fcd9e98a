"""The plans of any model's step at every batch size, from two traces of it.

At another batch size the same operations run on other sizes. The size of each storage is a line
over the examples of a micro-batch, so that two traces give it everywhere. A search for the largest
batch looks at dozens of sizes; what it finds is traced itself, which checks the line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np

from tight_fit.memory.plan import Plan, to_plan
from tight_fit.models.step import ModelStep
from tight_fit.trace.storage_trace import StorageTrace

# Fields that change nothing but sizes, and the values that lines were traced with; None is that of
# the configuration.
AXES: dict[str, int | None] = {"classes": None, "lora_rank": 8}
Traced = tuple[StorageTrace, int]  # a step's trace, and the model's number of parameters


class TraceStore(Protocol):
    """Traces of one model's steps that were made before."""

    def find(self, key: tuple) -> Traced | None:
        """The trace of a step, by numbers and texts that tell it from all others of the model."""

    def computed(self, device: str, step: ModelStep) -> Traced | None:
        """The trace of a step from those of others that differ in sizes only (`general`, `usual`),
        if these are known."""

    def keep(self, key: tuple, traced: Traced) -> None:
        """Keep a trace."""


class BatchLines:
    """Plans of steps of one model that are traced only where they cannot be told from others.

    tracing  is called with each step that is traced, before it is
    kept     traces that need not be made, and to which those are added that are
    """

    def __init__(
        self,
        device: str,
        tracing: Callable[[ModelStep], object] = lambda step: None,
        kept: TraceStore | None = None,
    ):
        self.device, self.tracing, self.kept = device, tracing, kept
        # Steps that differ only in their batch size -> examples per micro-batch -> the trace.
        self._traces: dict[tuple, dict[int, Traced]] = {}
        self._crooked: set[tuple] = set()  # those whose sizes are no lines

    def plan(self, step: ModelStep) -> Plan:
        """The plan of a step, traced or on the line through two others.

        One on a line has no operations and no FLOPs of its own. Raises what `plan_model` raises.
        """
        family = _family(step)
        traces = self._traces.setdefault(family, {})
        if step.micro_batch not in traces:
            found = self._kept(step)
            if found is not None:
                traces[step.micro_batch] = found
        if step.micro_batch not in traces and family not in self._crooked:
            sizes = _on_the_line(traces, step.micro_batch)
            if sizes is not None:
                return to_plan(next(iter(traces.values())), step, self.device, sizes)
        return self.traced(step)

    @property
    def made(self) -> int:
        """The number of steps that were traced."""
        return sum(map(len, self._traces.values()))

    def checked(self, step: ModelStep) -> bool:
        """Whether a third trace has shown that the sizes of such steps are lines."""
        family = _family(step)
        return family not in self._crooked and len(self._traces.get(family, ())) > 2

    def traced(self, step: ModelStep) -> Plan:
        """The plan of a step from a trace of its own. Raises what `plan_model` raises."""
        family, examples = _family(step), step.micro_batch
        traces = self._traces.setdefault(family, {})
        if examples not in traces:
            traced = self._kept(step) or self._anew(step)
            expected = _on_the_line(traces, examples)
            if expected is not None and not np.array_equal(expected, traced[0].bytes):
                self._crooked.add(family)
            traces[examples] = traced
        return to_plan(traces[examples], step, self.device)

    def _key(self, step: ModelStep) -> tuple:
        """What tells a step from others; FLOPs and seconds are those of all its micro-batches."""
        return self.device, step.accumulation, step.micro_batch, *_family(step)

    def _kept(self, step: ModelStep) -> Traced | None:
        if not self.kept:
            return None
        found = self.kept.find(self._key(step))
        return found or self.kept.computed(self.device, step)

    def _anew(self, step: ModelStep) -> Traced:
        """Trace a step, and keep what was found."""
        self.tracing(step)
        from tight_fit.plans.model import trace_model_step  # imports PyTorch, which takes seconds
        from tight_fit.techniques.model_changes import quiet

        with quiet():
            traced = trace_model_step(step, self.device)
        if self.kept:
            self.kept.keep(self._key(step), traced)
        return traced


def general(step: ModelStep, device: str) -> tuple:
    """What steps have in common that differ in their batch size and length."""
    return device, *_family(replace(step, length=None))


def usual(step: ModelStep) -> tuple[ModelStep, dict[str, int]]:
    """The step that has the usual value of what only changes sizes, and {field: its own value}."""
    own = {name: value for name in AXES if (value := getattr(step, name)) not in (None, AXES[name])}
    lines: dict[str, Any] = {name: AXES[name] for name in own}
    return replace(step, **lines), own


def _family(step: ModelStep) -> tuple:
    """The same for steps that differ only in their batch size.

    Of several micro-batches two are traced, but grpo writes for all of them. A single
    example takes other operations than several.
    """
    plain = replace(step, batch_size=1, accumulation=1)
    values = [
        getattr(plain, field.name) for field in fields(plain) if field.name not in ("config",)
    ]
    traced = step.accumulation if step.task == "grpo" else min(step.accumulation, 2)
    return traced, step.micro_batch == 1, *values


def _on_the_line(traces: dict[int, Traced], examples: int) -> np.ndarray | None:
    """int64 [storages], bytes at a number of examples; None where there are no two like traces."""
    if len(traces) < 2:
        return None
    (first, (one, _)), (second, (other, _)) = list(traces.items())[:2]
    if one.events != other.events:
        return None
    at_first, at_second = np.array(one.bytes), np.array(other.bytes)
    steps, rest = np.divmod(at_second - at_first, second - first)
    return None if rest.any() else at_first + steps * (examples - first)

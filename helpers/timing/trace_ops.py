"""The kernels of a training step, read off the operations that torch runs on tensors without values.

`Recorder.see` is told of each operation as it is dispatched and notes what a GPU would run for it: the kind of kernel,
the floating-point operations, the bytes read and written, the shape that decides its speed. It never touches a tensor's
values, and looks at each distinct operation once, so that a traced step takes little longer with it than without.

The point of integration is `Recorder`: whatever already sees every operation (a `TorchDispatchMode`) calls
`recorder.see(function, args, kwargs, out, phase)`. `TraceOps` is such a mode by itself.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.timing.op import FORWARD, RECOMPUTE, PHASES, Op
from helpers.timing.describe import describe

KEPT_KINDS = (int, float, bool, str, torch.dtype, type(None))


@dataclass
class TracedOps:
    """The operations of one optimizer step in the order in which the CPU issues them.

    ops    the distinct operations; each is a tuple of kernels (`Op`), empty where no kernel runs (a view)
    order  (index into `ops`, index into `PHASES`) of each operation issued
    """
    ops: list[tuple[Op, ...]] = field(default_factory=list)
    order: list[tuple[int, int]] = field(default_factory=list)

    def counted(self) -> Counter:
        """{(Op, phase name): times it is run} over the step."""
        found: Counter = Counter()
        for (index, phase), times in Counter(self.order).items():
            for op in self.ops[index]:
                found[op, PHASES[phase]] += times
        return found

    @property
    def flops(self) -> dict[str, int]:
        """Floating-point operations of matrix products, attention and convolutions, by phase."""
        total = dict.fromkeys(PHASES, 0)
        for (op, phase), times in self.counted().items():
            total[phase] += op.flops * times
        return total

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that the kernels read and write, by phase."""
        total = dict.fromkeys(PHASES, 0)
        for (op, phase), times in self.counted().items():
            total[phase] += (op.read + op.written) * times
        return total

    def repeat(self, begin: int, end: int, times: int) -> None:
        """Insert operations `begin` to `end` of the order `times` more times after `end`: the micro-batches that are not
        traced because they do what an earlier one did."""
        self.order[end:end] = self.order[begin:end] * times


class Recorder:
    """Notes operations as a step is run. `traced` is what has been seen."""

    def __init__(self):
        self.traced = TracedOps()
        self._known: dict = {}
        self._kernels: dict[tuple[Op, ...], int] = {}

    def see(self, function, args, kwargs, out, phase: int) -> None:
        """Note one dispatched operation and its result. `phase` is an index into `PHASES`."""
        key = (function, _key(args), _key(tuple(kwargs.items())) if kwargs else ())
        index = self._known.get(key)
        if index is None:
            kernels = tuple(describe(function, args, kwargs, out))
            index = self._kernels.setdefault(kernels, len(self.traced.ops))
            if index == len(self.traced.ops):
                self.traced.ops.append(kernels)
            self._known[key] = index
        self.traced.order.append((index, phase))


class TraceOps(TorchDispatchMode):
    """A mode that records every operation dispatched while it is active, in the phase last named."""

    def __init__(self):
        super().__init__()
        self.recorder = Recorder()
        self._phase = FORWARD
        self.looking = True

    @property
    def traced(self) -> TracedOps:
        return self.recorder.traced

    def phase(self, name: str) -> None:
        """The step enters "forward", "backward" or "optimizer"."""
        self._phase = PHASES.index(name)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self.looking:
            again = PHASES[self._phase] == "backward" and torch.is_grad_enabled()  # only a recomputed forward pass does that
            self.recorder.see(function, args, kwargs, out, RECOMPUTE if again else self._phase)
        return out


def _key(values):
    """What of an operation's arguments decides its kernels, hashable: sizes, strides and types, not values."""
    parts = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append((tuple(value.shape), value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value))
        else:
            parts.append(value if isinstance(value, KEPT_KINDS) else str(value))
    return tuple(parts)

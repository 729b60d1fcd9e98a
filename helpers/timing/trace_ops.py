"""The kernels of a training step, read off the operations that torch runs on tensors without
values.

`Recorder.see` is told of each operation as it is dispatched and notes what a GPU would run for it:
the kind of kernel, the floating-point operations, the bytes read and written, the shape that
decides its speed. It never touches a tensor's values, and looks at each distinct operation once, so
that a traced step takes little longer with it than without.

The point of integration is `Recorder`: whatever already sees every operation (a
`TorchDispatchMode`) calls `recorder.see(function, args, kwargs, out, phase)`. `TraceOps` is such a
mode by itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.timing.describe import describe
from helpers.timing.op import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE, Op
from helpers.tracker import WRAPPERS

# What is dispatched and is no work: tensors without values ask for their device, the profiler
# marks a range.
NO_WORK = {
    torch.ops.prim.device.default,
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
KEPT_KINDS = (int, float, bool, str, torch.dtype, type(None))


@dataclass
class TracedOps:
    """The operations of one optimizer step in the order in which the CPU issues them.

    ops    the distinct operations; each is a tuple of kernels (`Op`), empty where no kernel runs (a
           view)
    order  (index into `ops`, index into `PHASES`) of each operation issued
    tf32   whether its fp32 products run on tensor cores where a GPU has TF32
    """

    ops: list[tuple[Op, ...]] = field(default_factory=list)
    order: list[tuple[int, int]] = field(default_factory=list)
    tf32: bool = False

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
        """Insert operations `begin` to `end` of the order `times` more times after `end`: the
        micro-batches that are not
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
        if function in NO_WORK:
            return
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
    """A mode that records every operation dispatched while it is active.

    What autograd runs is told from the rest by itself: "backward", and "recompute" where gradients
    are switched on inside.
    The rest belongs to the phase last named by `phase`; with `automatic`, what
    runs without gradients after a backward pass is the optimizer.
    """

    def __init__(self, automatic: bool = False):
        super().__init__()
        self.recorder = Recorder()
        self.looking = True
        self._automatic = automatic
        self._phase = FORWARD
        self._updates = (
            False  # whether a backward pass has ended and nothing has needed gradients since
        )

    @property
    def traced(self) -> TracedOps:
        return self.recorder.traced

    def phase(self, name: str) -> None:
        """The step enters "forward", "backward" or "optimizer"."""
        self._phase = PHASES.index(name)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # the operations on what it wraps come by
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self.looking and function not in NO_WORK:
            self.recorder.see(function, args, kwargs, out, self._now())
        return out

    def _now(self) -> int:
        if torch._C._current_graph_task_id() != -1:  # autograd is running: no public name tells it
            self._updates = True
            return RECOMPUTE if torch.is_grad_enabled() else BACKWARD
        if self._automatic:
            self._updates = self._updates and not torch.is_grad_enabled()
            return OPTIMIZER if self._updates else FORWARD
        return self._phase


def _key(values):
    """What of an operation's arguments decides its kernels, hashable: sizes, strides and types, not
    values."""
    parts: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append((tuple(value.shape), value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value))
        else:
            parts.append(value if isinstance(value, KEPT_KINDS) else str(value))
    return tuple(parts)

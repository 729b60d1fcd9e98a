"""The kernels of a training step, read off the operations that torch runs on fake tensors.

`Recorder.see` is told of each operation as it is dispatched and notes what a GPU would run for it:
the kind of kernel, the floating-point operations, the bytes read and written, the shape that
decides its speed. It never touches a tensor's values, and describes each distinct operation once,
so that a traced step takes little longer with it than without.

`trace.tracker.Tracker`, which sees every operation of a planned step, has a `Recorder`; `TraceOps`
is a mode that does nothing but record.
"""

from __future__ import annotations

import torch

from tight_fit.kernels.describe import describe
from tight_fit.kernels.host_memory import off_gpu, waiting
from tight_fit.kernels.op import BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTE, Op
from tight_fit.kernels.traced_ops import TracedOps
from tight_fit.torch_private import TorchDispatchMode, has_wrapper, in_backward, no_work

NO_WORK = no_work()
KEPT_KINDS = (int, float, bool, str, torch.dtype, type(None))


class Recorder:
    """Notes operations as a step is run. `traced` is what has been seen.

    What autograd runs is told from the rest by itself: "backward", and "recompute" where gradients
    are switched on inside. The rest belongs to the phase last named by `phase`. With `automatic`
    nobody names phases: what runs without gradients after a backward pass is the optimizer, and the
    rest is "forward".
    """

    def __init__(self, automatic: bool = False):
        self.traced = TracedOps()
        self._automatic = automatic
        self._phase = FORWARD
        # Whether a backward pass has ended and nothing has needed gradients since.
        self._updates = False
        self._known: dict = {}
        self._kernels: dict[tuple[Op, ...], int] = {}

    def phase(self, name: str) -> None:
        """The step enters "forward", "backward" or "optimizer"."""
        self._phase = PHASES.index(name)

    def see(self, function, args, kwargs, out, way: str = "") -> None:
        """Note one dispatched operation and its result.

        way  "host" for one that the CPU computes in its own memory, "to host" or "from host" for a
             copy between that memory and the GPU's
        """
        if function in NO_WORK:
            return
        key = (function, _key(args), _key(tuple(kwargs.items())) if kwargs else (), way)
        index = self._known.get(key)
        if index is None:
            kernels = self._described(function, args, kwargs, out)
            index = self._known[key] = self._number(off_gpu(kernels, way) if way else kernels)
        self.traced.order.append((index, self._now()))

    def wait(self, way: str, still: int) -> None:
        """Note that the GPU waits for all but the last `still` copies of a way."""
        self.add((waiting(way, still),))

    def add(self, kernels: tuple[Op, ...]) -> None:
        """Note kernels that no single operation stands for, such as one of several fused."""
        self.traced.order.append((self._number(kernels), self._now()))

    def _number(self, kernels: tuple[Op, ...]) -> int:
        index = self._kernels.setdefault(kernels, len(self.traced.ops))
        if index == len(self.traced.ops):
            self.traced.ops.append(kernels)
        return index

    def _described(self, function, args, kwargs, out) -> tuple[Op, ...]:
        """Its kernels. A plan of memory does not need them, so it goes on where they are unknown;
        `step_seconds.seconds` refuses such a step."""
        try:
            return tuple(describe(function, args, kwargs, out))
        except Exception as error:  # arguments that no rule expects: each fails in its own way
            self.traced.unknown = self.traced.unknown or (
                f"The time of the operation {function} is not known ({type(error).__name__})."
            )
            return ()

    def _now(self) -> int:
        if in_backward():
            self._updates = True
            return RECOMPUTE if torch.is_grad_enabled() else BACKWARD
        if self._automatic:
            self._updates = self._updates and not torch.is_grad_enabled()
            return OPTIMIZER if self._updates else FORWARD
        return self._phase


class TraceOps(TorchDispatchMode):
    """A mode that records every operation dispatched while it is active and `looking` is true."""

    def __init__(self, automatic: bool = False):
        super().__init__()
        self.recorder = Recorder(automatic)
        self.looking = True

    @property
    def traced(self) -> TracedOps:
        """What has been recorded."""
        return self.recorder.traced

    def phase(self, name: str) -> None:
        """The step enters "forward", "backward" or "optimizer"."""
        self.recorder.phase(name)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if has_wrapper(types):
            return NotImplemented  # the operations on what it wraps come by
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self.looking:
            self.recorder.see(function, args, kwargs, out)
        return out


def _key(values):
    """What of an operation's arguments decides its kernels, hashable.

    That is sizes, strides and dtypes of tensors, and no values of theirs.
    """
    parts: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            parts.append((tuple(value.shape), value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value))
        else:
            parts.append(value if isinstance(value, KEPT_KINDS) else str(value))
    return tuple(parts)

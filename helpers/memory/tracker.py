"""Every tensor storage's birth and death during a training step, by category.

The tracker is a `TorchDispatchMode`, which every PyTorch operation passes, on real tensors and on
fake ones alike. It notes each new storage once and learns of its death by a weak reference, as
PyTorch's own `MemTracker` does (torch.distributed._tools). Unlike that one it keeps the whole
sequence, so that a plan can be drawn, scaled and searched.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from helpers.timing.trace_ops import Recorder, TracedOps
from helpers.torch_private import (
    WRAPPERS,
    TorchDispatchMode,
    storage_key,
    tree_leaves,
)

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = range(5)
CATEGORIES = ("parameters", "gradients", "optimizer states", "activations", "temporaries")
PHASES = ("forward", "backward", "optimizer")
BORN, DIES, MOVES = range(3)
REDUCE_SCATTER = "_reduce_scatter_base_"  # by which FSDP gets this rank's shard of a gradient

aten = torch.ops.aten
Event = tuple[int, int, int, int]  # kind, storage, category, phase


@dataclass
class StorageTrace:
    """What happened to the storages of a step, in order.

    bytes    size of each storage
    made_by  name of the operation that made each storage
    events   (kind, storage, category, phase), where the kind is BORN (the storage appears in a
             category), DIES (it is freed) or MOVES (it changes its category, as a finished gradient
             does), and storage is an index into `bytes` and `made_by`
    begin    number of events before the step, which tell what existed already
    flops    {phase: floating-point operations}; "recompute" counts as a phase of its own
    operations  what a GPU would run, where the tracker had a recorder; None elsewhere
    """

    bytes: list[int] = field(default_factory=list)
    made_by: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    begin: int = 0
    flops: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("forward", "recompute", "backward"), 0)
    )
    operations: TracedOps | None = field(default=None, compare=False)


class Tracker(TorchDispatchMode):
    """Records a `StorageTrace` while active.

    A storage made in the forward pass counts as an activation, and so does one recomputed in the
    backward pass (where gradients are then switched on). Any other counts as temporary until it
    becomes a parameter's gradient. FLOPs are counted by PyTorch's own formulas
    (`torch.utils.flop_counter`).

    recorder  is told of each operation, for plans of time; None where nobody asks for them
    """

    def __init__(self, recorder: Recorder | None = None):
        super().__init__()
        self.recorder = recorder
        self.storage_trace = StorageTrace()
        self._phase = 0
        self._alive: dict[int, tuple[int, int]] = {}  # storage address -> (index, category)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._resizes: AbstractContextManager[None] | None = None
        self._paused = False

    def phase(self, name: str) -> None:
        """Say that a phase begins: "forward", "backward" or "optimizer"."""
        self._phase = PHASES.index(name)
        if self.recorder is not None:
            self.recorder.phase(name)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside is not noted; it can be adopted afterwards."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def adopt(self, tensors, category: int) -> None:
        """Count tensors that exist already; nested lists, tuples and dicts are searched for them.

        A storage that is known already moves to the category.
        """
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, category, "given")

    def watch_gradients(self, model: torch.nn.Module) -> None:
        """Move each trained parameter's gradient to its category once it is complete."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda p: self._see(p.grad, GRADIENTS, "gradient")
                    )
                )

    def __enter__(self):
        self._resizes = resizes_reported_to(self._resized)
        self._resizes.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        if self._resizes is not None:
            self._resizes.__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        self._alive.clear()  # deaths from here on do not belong to the step
        self.storage_trace.events = _deaths_sorted(self.storage_trace.events)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # the operations on the wrapped tensor arrive here by themselves
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self._paused:
            return out
        if self.recorder is not None:
            self.recorder.see(function, args, kwargs, out)
        name = function.overloadpacket.__name__
        recompute = self._phase == 1 and torch.is_grad_enabled()
        formula = FLOPS.get(function.overloadpacket)
        if formula is not None:
            flops, phase = self.storage_trace.flops, PHASES[self._phase]
            key = "recompute" if recompute else phase
            flops[key] = flops.get(key, 0) + formula(*args, **kwargs, out_val=out)
        category = ACTIVATIONS if self._phase == 0 or recompute else TEMPORARIES
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, category, name, new=True)
        if name == REDUCE_SCATTER:
            self._see(args[0], GRADIENTS, "reduce_scatter")
        return out

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._forget(storage_key(storage))
        if not self._paused and storage.nbytes():
            self._born(storage, PARAMETERS, "gathered")

    def _see(self, tensor: torch.Tensor, category: int, made_by: str, new: bool = False) -> None:
        while isinstance(tensor, WRAPPERS):
            tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._alive:
            index, old = self._alive[key]
            if not new and old != category:
                self._alive[key] = (index, category)
                self.storage_trace.events.append((MOVES, index, category, self._phase))
            return
        self._born(storage, category, made_by)

    def _born(self, storage: torch.UntypedStorage, category: int, made_by: str) -> None:
        key, index = storage_key(storage), len(self.storage_trace.bytes)
        self.storage_trace.bytes.append(storage.nbytes())
        self.storage_trace.made_by.append(made_by)
        self._alive[key] = (index, category)
        self.storage_trace.events.append((BORN, index, category, self._phase))
        weakref.finalize(storage, self._forget, key, index).atexit = False

    def _forget(self, key: int, index: int | None = None) -> None:
        """The storage at that address has died.

        One that was resized before is reported twice: `index` tells the first life from the second.
        """
        if key not in self._alive or index not in (None, self._alive[key][0]):
            return
        index, category = self._alive.pop(key)
        self.storage_trace.events.append((DIES, index, category, self._phase))


@contextmanager
def resizes_reported_to(report: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `report(storage)` is called after each change of a storage's size.

    FSDP keeps the storage of a gathered parameter and only gives its memory back, by
    `UntypedStorage.resize_`. No operation tells a dispatch mode of it, so the method itself is
    replaced for the time of the step.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_report(storage, size):
        result = resize(storage, size)
        report(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize_and_report):
        yield


@contextmanager
def steady_memory() -> Iterator[None]:
    """No cyclic garbage collection inside: it would free tensors at unpredictable moments."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _deaths_sorted(events: list[Event]) -> list[Event]:
    """The events with deaths that follow one another sorted by storage.

    Autocast frees its cached casts in the order of their addresses, which differs between runs.
    """
    ordered: list[Event] = []
    deaths: list[Event] = []
    for event in events:
        if event[0] == DIES:
            deaths.append(event)
            continue
        ordered += sorted(deaths)
        deaths = []
        ordered.append(event)
    return ordered + sorted(deaths)


def _shape_formula(formula):
    """A formula that takes shapes, as one that takes the operation's arguments."""

    def count(*args, out_val=None, **kwargs):
        return formula(*(arg.shape for arg in args if isinstance(arg, torch.Tensor)))

    return count


# PyTorch has formulas for GPUs' attention kernels; the CPU's kernel computes the same products.
FLOPS = {**flop_registry}
for _name, _formula in (
    (
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda q, k, v, *rest: sdpa_flop_count(q, k, v),
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        lambda g, q, k, v, *rest: sdpa_backward_flop_count(g, q, k, v),
    ),
):
    if hasattr(aten, _name):
        FLOPS.setdefault(getattr(aten, _name), _shape_formula(_formula))

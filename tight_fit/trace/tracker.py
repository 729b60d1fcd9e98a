"""Every tensor storage's birth and death during a training step, by category.

The tracker is a dispatch mode, which every PyTorch operation passes, on real tensors and on
fake ones alike. It notes each new storage once and learns of its death by a weak reference, as
PyTorch's own `MemTracker` does (torch.distributed._tools). Unlike that one it keeps the whole
sequence, so that a plan can be drawn, scaled and searched.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch

from tight_fit.kernels.op import Op
from tight_fit.kernels.trace_ops import Recorder
from tight_fit.techniques import host
from tight_fit.torch_private import (
    DEVICE_OF,
    WRAPPERS,
    FakeTensor,
    PlainDispatchMode,
    adds_in_place,
    count_holders,
    device_for_torch,
    has_wrapper,
    inside,
    storage_key,
    tree_leaves,
)
from tight_fit.trace.cublas import PRODUCTS, copied_for_cublas
from tight_fit.trace.flops import FORMULAS
from tight_fit.trace.storage_trace import (
    ACTIVATIONS,
    BORN,
    DIES,
    GRADIENTS,
    HOST,
    MARK,
    MOVES,
    PARAMETERS,
    PHASES,
    TEMPORARIES,
    StorageTrace,
    deaths_sorted,
)

JOINS = {"cat", "stack"}  # operations that read many tensors at once
REDUCE_SCATTER = "_reduce_scatter_base_"  # by which FSDP gets this rank's shard of a gradient
COPY_IN = "all_gather_copy_in"  # by which FSDP fills the buffer in which weights are gathered

aten = torch.ops.aten


class Tracker(PlainDispatchMode):
    """Records a `StorageTrace` while active.

    A storage made in the forward pass counts as an activation, and so does one recomputed in the
    backward pass (where gradients are then switched on). Any other counts as temporary until it
    becomes a parameter's gradient. Where autograd adds one gradient to another, it is as without a
    mode, in place where nothing else holds the first (`torch_private.adds_in_place`). FLOPs are
    counted by the formulas of `memory.flops`.

    recorder  is told of each operation, for plans of time; None where nobody asks for them
    on_gpu    whether the step is that of a GPU, whose matrix products copy operands that cuBLAS
              cannot read (`memory.cublas`)
    """

    def __init__(self, recorder: Recorder | None = None, on_gpu: bool = False):
        super().__init__()
        self.recorder = recorder
        self.on_gpu = on_gpu
        self.storage_trace = StorageTrace()
        self._phase = 0
        self._alive: dict[int, tuple[int, int]] = {}  # storage address -> (index, category)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._resizes: AbstractContextManager[None] | None = None
        self._paused = False
        self._elsewhere: set[int] = set()  # addresses of storages that are not on the GPU
        # The storages that each operation of `JOINS` read; None where nobody asks.
        self.joined: list[list[int]] | None = None

    def phase(self, name: str) -> None:
        """Say that a phase begins: one of `PHASES`; a recorder knows no generation."""
        self._phase = PHASES.index(name)
        if self.recorder is not None:
            self.recorder.phase(name)

    def mark(self, number: int) -> None:
        """Put a mark between two events."""
        self.storage_trace.events.append((MARK, number, 0, self._phase))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside is not noted; it can be adopted afterwards."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def adopt(self, tensors, category: int) -> None:
        """Count tensors that exist already; nested lists, tuples and dicts are searched for them.

        A storage that is known already moves to the category.
        """
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, category, "given")

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count neither these tensors, which lie in the host's memory, nor what is done to them.

        So are the counters of steps that PyTorch's unfused optimizers keep and read on a CPU.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            self._elsewhere.add(key)
            weakref.finalize(storage, self._elsewhere.discard, key).atexit = False

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
        count_holders()
        self._resizes = resizes_reported_to(self._resized)
        self._resizes.__enter__()
        host.listeners.append(self._waited)
        return super().__enter__()

    def __exit__(self, *exception):
        if self._resizes is not None:
            self._resizes.__exit__(*exception)
        host.listeners.remove(self._waited)
        for handle in self._handles:
            handle.remove()
        self._alive.clear()  # deaths from here on do not belong to the step
        self.storage_trace.events = deaths_sorted(self.storage_trace.events)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is DEVICE_OF and isinstance(args[0], FakeTensor):
            return device_for_torch(args[0])
        if has_wrapper(types):
            return NotImplemented  # the operations on the wrapped tensor arrive here by themselves
        kwargs = kwargs or {}
        in_place = adds_in_place(function, args, kwargs)
        out = function(*args, **kwargs)
        if self._paused:
            return out
        name, on_host = function.overloadpacket.__name__, host.is_active()
        if self._elsewhere and self._phase == 2 and self._is_elsewhere(name, args):
            self.leave_out(part for part in tree_leaves(out) if isinstance(part, torch.Tensor))
            return out
        if self.recorder is not None:
            way = self._way(args) if name == "copy_" else None
            self.recorder.see(function, args, kwargs, out, way or ("host" if on_host else ""))
        if self.joined is not None and name in JOINS:
            self.joined.append([self._index(tensor) for tensor in tree_leaves(args)])
        recompute = self._recomputes()
        formula = FORMULAS.get(function.overloadpacket)
        if formula is not None:
            flops, phase = self.storage_trace.flops, PHASES[self._phase]
            key = "recompute" if recompute else phase
            operands = [argument for argument in args if not isinstance(argument, torch.dtype)]
            flops[key] = flops.get(key, 0) + formula(*operands, **kwargs, out_val=out)
        if in_place:
            self._succeed(args[0].untyped_storage(), out.untyped_storage())
        category = HOST if on_host else self._category()
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, category, name, new=True)
        if self.on_gpu and name in PRODUCTS and not on_host:
            self._copy(copied_for_cublas(args[PRODUCTS[name] :]))
        if name == "embedding_dense_backward" and not args[0].is_contiguous() and not on_host:
            self._copy([args[0]])  # the kernels of CPU and CUDA make it contiguous first
        if name == REDUCE_SCATTER:
            self._see(args[0], GRADIENTS, "reduce_scatter")
            self._named(args[0], "reduce_scatter")
        elif name == COPY_IN:
            self._named(args[:2], "all_gather")
        return out

    def fused(
        self,
        made: Iterable[torch.Tensor],
        kernels: tuple[Op, ...],
        reused: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """Note what a fused kernel has made, whose operations ran while this was paused.

        reused  (a tensor that is read for the last time, what is written over it)
        """
        if self.recorder is not None and kernels:
            self.recorder.add(kernels)
        for old, new in reused:
            self._succeed(old.untyped_storage(), new.untyped_storage())
        for tensor in made:
            self._see(tensor, self._category(), "fused", new=True)

    def _recomputes(self) -> bool:
        return self._phase == 1 and torch.is_grad_enabled()

    def _category(self) -> int:
        """The category of what is made now."""
        forward = self._phase in (0, 3) or self._recomputes()
        return ACTIVATIONS if forward else TEMPORARIES

    def _is_elsewhere(self, name: str, args: tuple) -> bool:
        """Whether all that an operation reads is left out, or it makes a tensor of a number."""
        read = [part for part in tree_leaves(args) if isinstance(part, torch.Tensor)]
        if name == "lift_fresh":
            return True
        return bool(read) and all(
            storage_key(part.untyped_storage()) in self._elsewhere for part in read
        )

    def _named(self, tensors, made_by: str) -> None:
        """Note what buffers are for: FSDP allocates those of its messages on streams of their own.

        A storage that was there before the step, such as a shard, keeps its name.
        """
        made = self.storage_trace.made_by
        for index in map(self._index, tree_leaves(tensors)):
            if index >= 0 and made[index] != "given":
                made[index] = made_by

    def _index(self, tensor: object) -> int:
        """The number of a tensor's storage, -1 where it is not known."""
        if not isinstance(tensor, torch.Tensor):
            return -1
        return self._alive.get(storage_key(tensor.untyped_storage()), (-1, 0))[0]

    def _way(self, args: tuple) -> str | None:
        """The way of a copy between the two memories, None for one within one of them."""
        (_, target), (_, source) = (
            self._alive.get(storage_key(tensor.untyped_storage()), (-1, 0)) for tensor in args[:2]
        )
        if (target == HOST) == (source == HOST):
            return None
        return host.TO_HOST if target == HOST else host.FROM_HOST

    def _waited(self, way: str, still: int) -> None:
        if self.recorder is not None and not self._paused:
            self.recorder.wait(way, still)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._forget(storage_key(storage))
        if not self._paused and storage.nbytes():
            self._born(storage, PARAMETERS, "gathered")

    def _see(self, tensor: torch.Tensor, category: int, made_by: str, new: bool = False) -> None:
        while isinstance(tensor, WRAPPERS):
            tensor = inside(tensor)
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

    def _copy(self, operands: list[torch.Tensor]) -> None:
        """Operands of the operation just seen are copied for the time that it runs."""
        first, trace = len(self.storage_trace.bytes), self.storage_trace
        for operand in operands:
            trace.bytes.append(operand.numel() * operand.element_size())
            trace.made_by.append("copy for cuBLAS")
        for kind in (BORN, DIES):
            for index in range(first, len(trace.bytes)):
                trace.events.append((kind, index, TEMPORARIES, self._phase))

    def _succeed(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Count the new storage as the old one, which a GPU would have written to in place."""
        known = self._alive.pop(storage_key(old), None)
        if known is not None:
            key = storage_key(new)
            self._alive[key] = known
            weakref.finalize(new, self._forget, key, known[0]).atexit = False

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

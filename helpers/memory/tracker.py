"""Every tensor storage's birth and death during a training step, by category.

The tracker sits where every operation of torch passes (`TorchDispatchMode`), on real tensors and on fake ones alike.
It notes each new storage once and waits for its death with a weak reference, as torch's own `MemTracker`
(torch.distributed._tools) does; it keeps the whole story, so that a plan can be drawn, scaled and searched.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from helpers.torch_private import (
    AsyncCollectiveTensor,
    TorchDispatchMode,
    storage_key,
    tree_leaves,
)

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES = range(5)
CATEGORIES = ("parameters", "gradients", "optimizer states", "activations", "temporaries")
PHASES = ("forward", "backward", "optimizer")
BORN, DIES, MOVES = range(3)
WRAPPERS = (DTensor, AsyncCollectiveTensor)  # tensors that are made of another

aten = torch.ops.aten


@dataclass
class StorageTrace:
    """What happened, in order. `events` are (kind, storage, category, phase); `bytes[storage]` is a size. The step
    begins after the first `begin` events, which tell what was there before.

    BORN: a storage appears in a category. DIES: it is freed. MOVES: it changes category (a finished gradient).
    """

    bytes: list[int] = field(default_factory=list)
    made_by: list[str] = field(default_factory=list)
    events: list[tuple[int, int, int, int]] = field(default_factory=list)
    begin: int = 0
    flops: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("forward", "recompute", "backward"), 0)
    )


class Tracker(TorchDispatchMode):
    """Records a `Story` while active. Counts FLOPs with torch's own formulas (`torch.utils.flop_counter`).

    A storage born in the forward pass counts as an activation, as does one recomputed in the backward pass (there,
    gradients are switched on); any other is temporary until it becomes a parameter's gradient.
    """

    def __init__(self):
        super().__init__()
        self.storage_trace = StorageTrace()
        self._resize = None
        self._phase = 0
        self._alive: dict[int, tuple[int, int]] = {}  # storage address -> (index, category)
        self._handles = []
        self._looking = True

    def phase(self, name: str) -> None:
        self._phase = PHASES.index(name)

    @contextmanager
    def looking_away(self):
        """What is made inside is not noted (it can be adopted afterwards)."""
        self._looking = False
        try:
            yield
        finally:
            self._looking = True

    def adopt(self, tensors, category: int) -> None:
        """Count tensors that exist already. A storage known already moves to the category."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, category, "given")

    def watch_gradients(self, model: torch.nn.Module) -> None:
        """Let each parameter's gradient change its category when it is complete."""
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda p: self._see(p.grad, GRADIENTS, "gradient")
                    )
                )

    def __enter__(self):
        # FSDP keeps a gathered parameter's storage and gives its memory back: no operation of torch's tells of it.
        self._resize = resize = torch.UntypedStorage.resize_

        def watched(storage, size):
            out = resize(storage, size)
            self._resized(storage)
            return out

        torch.UntypedStorage.resize_ = watched
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._resize
        for handle in self._handles:
            handle.remove()
        self._alive.clear()  # what dies from now on is not part of the story
        self.storage_trace.events = _in_order(self.storage_trace.events)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # the operations on what it wraps come by
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if not self._looking:
            return out
        recompute = self._phase == 1 and torch.is_grad_enabled()
        count = FLOPS.get(function.overloadpacket)
        if count is not None:
            name = "recompute" if recompute else PHASES[self._phase]
            self.storage_trace.flops[name] = self.storage_trace.flops.get(name, 0) + count(
                *args, **kwargs, out_val=out
            )
        category = ACTIVATIONS if self._phase == 0 or recompute else TEMPORARIES
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, category, function.overloadpacket.__name__, new=True)
        if (
            function.overloadpacket.__name__ == "_reduce_scatter_base_"
        ):  # FSDP's: this rank's part of the gradient
            self._see(args[0], GRADIENTS, "reduce_scatter")
        return out

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._forget(storage_key(storage))
        if self._looking and storage.nbytes():
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
        """The storage at that address has died; one that was resized first is told of twice."""
        if key not in self._alive or index not in (None, self._alive[key][0]):
            return
        index, category = self._alive.pop(key)
        self.storage_trace.events.append((DIES, index, category, self._phase))


@contextmanager
def steady_memory():
    """No cyclic garbage collection inside: it would free things at a moment that nobody can foretell."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _in_order(events: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Deaths that follow one another, sorted: autocast frees its cached casts in the order of their addresses."""
    ordered, deaths = [], []
    for event in events:
        if event[0] == DIES:
            deaths.append(event)
            continue
        ordered += sorted(deaths)
        deaths = []
        ordered.append(event)
    return ordered + sorted(deaths)


def _shape_formula(formula):
    """A formula of shapes, given tensors."""

    def count(*args, out_val=None, **kwargs):
        return formula(*(arg.shape for arg in args if isinstance(arg, torch.Tensor)))

    return count


# torch has formulas for the attention kernels of GPUs; the CPU's kernel computes the same products.
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

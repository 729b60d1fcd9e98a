"""Activations that wait for the backward pass in the host's memory.

In the forward pass each tensor that autograd saves is copied to the host, and leaves the GPU when
the copy is done. In the backward pass the tensors come back in the opposite order. On a GPU both
copies run on streams of their own beside the computation: while one tensor is used, the next ones
are on their way (prefetching). PyTorch's own `torch.autograd.graph.save_on_cpu` copies weights as
well, a tensor once for each operation that saved it, and nothing ahead.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import nn

from tight_fit.techniques.host import FROM_HOST, TO_HOST, on_host, tell_of_wait
from tight_fit.torch_private import storage_key

SMALLEST = 2**15  # bytes; a copy of less takes longer to begin than to make
LEAVING = 2  # copies to the host that may be under way; the GPU's memory is held until they end
AHEAD = 2  # tensors that are fetched before they are asked for


class OffloadedActivations:
    """A context for one forward pass of `model`; the backward pass may run after it.

    Each storage moves once each way, whoever saved it. What stays on the GPU: parameters, buffers,
    and storages of less than `SMALLEST` bytes.
    """

    def __init__(self, model: nn.Module):
        tensors = [*model.parameters(), *model.buffers()]
        self.stays = {storage_key(tensor.untyped_storage()) for tensor in tensors}
        self.copies = _Copies(next((tensor.device for tensor in tensors), torch.device("cpu")))
        self.moved: dict[tuple[int, int], _Moved] = {}
        self.order: list[weakref.ref[_Moved]] = []
        self.leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _Saved.fetched)

    def __enter__(self) -> OffloadedActivations:
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.hooks.__exit__(*exception)
        self._let_go(0)
        self.moved.clear()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        storage = tensor.untyped_storage()
        size, item = storage.nbytes(), tensor.element_size()
        if size < SMALLEST or size % item or storage_key(storage) in self.stays:
            return tensor
        key = storage_key(storage), tensor._version
        moved = self.moved.get(key)
        if moved is None:
            flat = tensor.as_strided((size // item,), (1,), 0)
            copy, event = self.copies.to_host(flat)
            moved = self.moved[key] = _Moved(self, copy, len(self.order))
            # Another storage may get the address when this one is gone.
            weakref.finalize(storage, self.moved.pop, key, None).atexit = False
            self.order.append(weakref.ref(moved))
            self.leaving.append((flat, event))
            self._let_go(LEAVING)
        moved.users += 1
        return _Saved(moved, tensor)

    def _let_go(self, most: int) -> None:
        while len(self.leaving) > most:
            flat, event = self.leaving.popleft()
            self.copies.wait(event, 0)
            del flat

    def fetch_before(self, place: int) -> None:
        """Begin to fetch the tensors that the backward pass will ask for next."""
        for index in range(place - 1, max(-1, place - 1 - AHEAD), -1):
            moved = self.order[index]()
            if moved is not None and moved.users > 0:
                moved.begin()


class _Moved:
    """A storage in the host's memory, and its copy on the GPU once it is on its way back.

    users  operations that saved it and have not asked for it yet
    """

    def __init__(self, owner: OffloadedActivations, copy: torch.Tensor, place: int):
        self.owner, self.copy, self.place, self.users = owner, copy, place, 0
        self.back: tuple[torch.Tensor, Any] | None = None

    def begin(self) -> None:
        if self.back is None:
            self.back = self.owner.copies.from_host(self.copy)

    def fetch(self) -> torch.Tensor:
        self.begin()
        assert self.back is not None
        self.owner.fetch_before(self.place)
        flat, event = self.back
        self.owner.copies.wait(event, 1)
        self.users -= 1
        if self.users <= 0:
            self.back = None
        return flat


class _Saved:
    """One saved tensor: a view of a moved storage."""

    def __init__(self, moved: _Moved, tensor: torch.Tensor):
        self.moved, self.dtype = moved, tensor.dtype
        self.view = tensor.shape, tensor.stride(), tensor.storage_offset()

    @staticmethod
    def fetched(saved: torch.Tensor | _Saved) -> torch.Tensor:
        """The tensor, on the GPU."""
        if isinstance(saved, torch.Tensor):
            return saved
        flat = saved.moved.fetch()
        return (flat if flat.dtype == saved.dtype else flat.view(saved.dtype)).as_strided(
            *saved.view
        )


class _Copies:
    """Copies between the two memories, on streams of their own where the model is on a GPU.

    Memory on the GPU is taken and given back in the order of the computation's own stream, so that
    a plan can say when.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.begun = [0, 0]  # copies that have begun, in each direction
        self.streams: Any = None
        if device.type == "cuda":
            self.streams = _streams(device)

    def to_host(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy in the host's memory, and what to wait for before the tensor is given back."""
        with on_host():
            copy = torch.empty(
                flat.shape, dtype=flat.dtype, device="cpu", pin_memory=self.streams is not None
            )
        return copy, self._copied(copy, flat, 0)

    def from_host(self, copy: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy on the GPU, and what to wait for before it is read."""
        flat = torch.empty(copy.shape, dtype=copy.dtype, device=self.device)
        return flat, self._copied(flat, copy, 1)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, direction: int) -> Any:
        self.begun[direction] += 1
        if self.streams is None:
            target.copy_(source)
            return self.begun[direction]
        stream = self.streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, event: Any, direction: int) -> None:
        """The computation waits for a copy to the host (0) or from it (1)."""
        if self.streams is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        else:
            tell_of_wait((TO_HOST, FROM_HOST)[direction], self.begun[direction] - event)


_made: dict[torch.device, tuple[Any, Any]] = {}


def _streams(device: torch.device) -> tuple[Any, Any]:
    """The two streams of a device, one for each direction, made once."""
    if device not in _made:
        _made[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
    return _made[device]

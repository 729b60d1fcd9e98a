"""Which blocks of a pretended GPU's memory are taken: PyTorch's allocator, simulated."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tight_fit.memory.allocator import CachingAllocator, CapacityExceeded

ENTER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
FULL = -1
AT_ONCE = 1024  # freed blocks that are asked for at a time


class Book:
    """The blocks of every pretended GPU of this process.

    count     GPUs
    capacity  bytes that the allocator may reserve on each
    freed     the library's function that gives the blocks freed since it was last asked

    The library calls `enter`. Python may collect garbage, and so free tensors, at any point of
    these methods: that only adds to what `freed` will give.
    """

    def __init__(self, count: int, capacity: int, freed: Callable[..., int]):
        self.ooms = [0] * count
        self.allocators = [CachingAllocator(capacity) for _ in range(count)]
        self.freed, self.callback = freed, ENTER(self.enter)
        self.history: list[list[dict[str, Any]]] | None = None  # of each GPU, while it is recorded
        self._asked: dict[tuple[int, int], int] = {}  # bytes of the blocks that history knows
        self._notes = (ctypes.c_int64 * (2 * AT_ONCE))()
        self._lock = threading.Lock()

    def enter(self, device: int, size: int) -> int:
        """An address, from 1, of a new block of `size` bytes; FULL where there is no room."""
        with self._lock:
            self._strike_out()
            try:
                address = self.allocators[device].malloc(size)
                self._note("alloc", device, address, size)
                return address + 1
            except CapacityExceeded:
                self.ooms[device] += 1
                return FULL

    def _strike_out(self) -> None:
        while count := self.freed(self._notes, AT_ONCE):
            notes = self._notes[: 2 * count]
            for device, address in zip(notes[::2], notes[1::2]):
                self.allocators[device].free(address - 1)
                self._note("free_completed", device, address - 1)

    def _note(self, action: str, device: int, address: int, size: int | None = None) -> None:
        if self.history is None:
            return
        if size is None:
            size = self._asked.pop((device, address), None)
            if size is None:  # it was there before
                return
        else:
            self._asked[device, address] = size
        frames = _frames() if action == "alloc" else []
        event = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        self.history[device].append(event)

    def record(self, enabled: str | None, *arguments: Any) -> None:
        """Begin to note what is allocated and freed, or end; as `torch._C` is asked for it."""
        with self._lock:
            self._strike_out()
            self._asked = {}
            self.history = [[] for _ in self.allocators] if enabled else None

    def snapshot(self, pool: Any = None) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot` returns: segments with their blocks, and the events
        of each GPU since `record`."""
        with self._lock:
            self._strike_out()
            segments = [
                _segment(device, blocks, self._asked)
                for device, allocator in enumerate(self.allocators)
                for blocks in allocator.segments()
            ]
            traces = [list(events) for events in self.history or [[] for _ in self.allocators]]
            return {"segments": segments, "device_traces": traces}

    def now(self, device: int) -> CachingAllocator:
        """The allocator of a GPU, up to date."""
        with self._lock:
            self._strike_out()
            return self.allocators[device]

    def empty_cache(self) -> None:
        """Give wholly free segments of every GPU back to the driver."""
        with self._lock:
            self._strike_out()
            for allocator in self.allocators:
                allocator.give_back()

    def limit(self, device: int, capacity: int) -> None:
        """From here on only so many bytes may be reserved."""
        self.now(device).capacity = capacity

    def stats(self, device: int) -> dict[str, Any]:
        """What `torch.cuda.memory_stats` makes its figures of, as far as the allocator knows it."""
        allocator = self.now(device)
        figures = {
            "allocated_bytes": (allocator.allocated, allocator.most_allocated),
            "active_bytes": (allocator.allocated, allocator.most_allocated),
            "reserved_bytes": (allocator.reserved, allocator.most_reserved),
        }
        stats = {
            name: {"all": {"current": current, "peak": peak}}
            for name, (current, peak) in figures.items()
        }
        return {"num_ooms": self.ooms[device], "num_alloc_retries": 0, **stats}


def _segment(
    device: int, blocks: list[tuple[int, int, bool]], asked: dict[tuple[int, int], int]
) -> dict[str, Any]:
    used = sum(size for _, size, taken in blocks if taken)
    return {
        "device": device,
        "address": blocks[0][0],
        "total_size": sum(size for _, size, _ in blocks),
        "allocated_size": used,
        "active_size": used,
        "stream": 0,
        "segment_type": "large",
        "blocks": [
            {
                "address": address,
                "size": size,
                "requested_size": asked.get((device, address), size),
                "state": "active_allocated" if taken else "inactive",
                "frames": [],
            }
            for address, size, taken in blocks
        ],
    }


def _frames() -> list[dict[str, Any]]:
    """The functions that are running, the innermost first, without those of this file."""
    found: list[dict[str, Any]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__:
            place = {"filename": code.co_filename, "line": frame.f_lineno}
            found.append({"name": code.co_name, **place})
        frame = frame.f_back
    return found

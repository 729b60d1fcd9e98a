"""Which blocks of a pretended GPU's memory are taken: PyTorch's allocator, simulated."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from helpers.memory.allocator import CachingAllocator, CapacityExceeded

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
        self._notes = (ctypes.c_int64 * (2 * AT_ONCE))()
        self._lock = threading.Lock()

    def enter(self, device: int, size: int) -> int:
        """An address, from 1, of a new block of `size` bytes; FULL where there is no room."""
        with self._lock:
            self._strike_out()
            try:
                return self.allocators[device].malloc(size) + 1
            except CapacityExceeded:
                self.ooms[device] += 1
                return FULL

    def _strike_out(self) -> None:
        while count := self.freed(self._notes, AT_ONCE):
            notes = self._notes[: 2 * count]
            for device, address in zip(notes[::2], notes[1::2]):
                self.allocators[device].free(address - 1)

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

    def stats(self, device: int) -> dict[str, int]:
        """What `torch.cuda.memory_stats` says, as far as the allocator knows it."""
        allocator = self.now(device)
        figures = {
            "allocated_bytes": (allocator.allocated, allocator.most_allocated),
            "active_bytes": (allocator.allocated, allocator.most_allocated),
            "reserved_bytes": (allocator.reserved, allocator.most_reserved),
        }
        stats = {"num_ooms": self.ooms[device], "num_alloc_retries": 0}
        for name, (current, peak) in figures.items():
            stats |= {f"{name}.all.current": current, f"{name}.all.peak": peak}
        return stats

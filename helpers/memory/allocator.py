"""PyTorch's CUDA caching allocator, simulated: what `torch.cuda.max_memory_allocated` and `max_memory_reserved` would say.

A plan counts bytes of tensors. A GPU counts blocks: the allocator takes large segments from the driver, cuts blocks from
them, merges freed neighbours, and keeps what it has. A block may be up to 1 MiB larger than its tensor, so "allocated" is
more than the tensors; a free block may be too small for the next tensor, so "reserved" is more than allocated. Both
follow from the order of births and deaths, which a plan knows.

The rules are those of c10/cuda/CUDACachingAllocator.cpp at its defaults (no expandable segments, no rounding to powers of
two), for one stream: what a second stream holds, such as FSDP's for gathering, is counted as if it were the first's. The
real GPU that they are compared with (published.py) ran PyTorch 2.11.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from helpers.gpus import WORKSPACE
from helpers.units import GIB, MIB

UNIT = 512  # every block is a multiple of it (kMinBlockSize)
SMALL = MIB  # tensors up to here live in a pool of their own (kSmallSize)
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # for tensors under 10 MiB (kLargeBuffer, kMinLargeAlloc)
LARGE_TENSOR = 10 * MIB
ROUND = 2 * MIB  # larger ones have a segment of their own, rounded up to this (kRoundLarge)
PASSES = 6  # at most: as a rule nothing new is reserved from the third step on
OPTIMIZER = 2  # the phase in which the first step makes its states


class CapacityExceeded(RuntimeError):
    """The simulated card is full, also after every unused segment went back to the driver."""


@dataclass(frozen=True, eq=False)
class AllocationTrace:
    """Births and deaths of storages in order: what an allocator is asked for in a steady step.

    sizes    int64 [storages], bytes asked for
    given    int32 [n], storages that are there before the first step: parameters and buffers
    states   int32 [m], those that the first optimizer step adds and that stay: its states
    moves    int32 [moments], storage + 1 where one is born, -(storage + 1) where it dies
    phases   int8 [moments], 0 forward, 1 backward, 2 optimizer
    """

    sizes: np.ndarray
    given: np.ndarray
    states: np.ndarray
    moves: np.ndarray
    phases: np.ndarray

    @cached_property
    def least(self) -> int:
        """Bytes that an allocator must be able to reserve for the step to run, to a thousandth (or 2 MiB), cuBLAS's workspaces
        (8.125 MiB each) included. Left alone it takes more; where there is no more, it gives back what it keeps unused."""
        free = replay(self, WORKSPACE)
        low, high = free.allocated, free.reserved
        while high - low > max(ROUND, free.allocated >> 10):
            middle = (low + high) // 2
            try:
                high = replay(self, WORKSPACE, middle).reserved
            except CapacityExceeded:
                low = middle
        return high


@dataclass(frozen=True)
class AllocatorPeaks:
    """Bytes at their peaks in a steady step: `allocated` in blocks that hold tensors, `reserved` taken from the driver."""

    allocated: int
    reserved: int

    def __str__(self) -> str:
        return f"{self.allocated / GIB:.2f} GiB allocated, {self.reserved / GIB:.2f} GiB reserved"


def replay(
    allocation_trace: AllocationTrace, workspace: int = 0, capacity: int | None = None
) -> AllocatorPeaks:
    """What a steady step occupies: the step is repeated until the allocator reserves nothing new. Under a bound the first
    steps may reserve more than those after them; the most that any of them did is what counts.

    workspace  bytes of each of cuBLAS's two workspaces: one from the first forward pass on, one from the first backward
    capacity   bytes the allocator may reserve, None for no bound
    Raises OutOfMemory where the capacity does not suffice.
    """
    life, most = _Life(allocation_trace, workspace, capacity), -1
    for _ in range(PASSES):
        found = life.step(allocation_trace)
        if found.reserved <= most:
            break
        most = found.reserved
    return AllocatorPeaks(found.allocated, most)


def replay_all(
    allocation_traces: Iterable[AllocationTrace], workspace: int = 0
) -> list[AllocatorPeaks]:
    """Steps of the same kind and of different sizes, such as batches of different lengths, one after the other: of each the
    allocated peak, and what is reserved up to then."""
    found, life = [], None
    for allocation_trace in allocation_traces:
        life = life or _Life(allocation_trace, workspace)
        found.append(life.step(allocation_trace))
    return found


class _Life:
    """An allocator through several steps, with what stays from one to the next."""

    def __init__(
        self, allocation_trace: AllocationTrace, workspace: int, capacity: int | None = None
    ):
        self.allocator, self.workspace = CachingAllocator(capacity), workspace
        self.places: dict[int, int] = {}  # storage -> address
        self.begun = -1  # the last phase of the first step that has begun
        sizes = allocation_trace.sizes.tolist()
        for storage in allocation_trace.given.tolist():
            self._born(storage, sizes)
        self.lasting = set(self.places)

    def step(self, allocation_trace: AllocationTrace) -> AllocatorPeaks:
        """One step's peaks."""
        sizes, allocator, places = allocation_trace.sizes.tolist(), self.allocator, self.places
        allocator.reset_peaks()
        for move, phase in zip(allocation_trace.moves.tolist(), allocation_trace.phases.tolist()):
            while self.begun < phase:
                self._begin(allocation_trace, sizes)
            if move > 0:
                self._born(move - 1, sizes)
            elif (address := places.pop(-move - 1, None)) is not None:
                allocator.free(address)
        for storage in places.keys() - self.lasting:  # what the step returns: its loss
            allocator.free(places.pop(storage))
        return AllocatorPeaks(allocator.most_allocated, allocator.most_reserved)

    def _begin(self, allocation_trace: AllocationTrace, sizes: list[int]) -> None:
        """What a phase adds when it is met for the first time."""
        self.begun += 1
        if self.begun < OPTIMIZER and self.workspace:
            self.allocator.malloc(self.workspace)
        elif self.begun == OPTIMIZER:
            for storage in allocation_trace.states.tolist():
                self._born(storage, sizes)
                self.lasting.add(storage)

    def _born(self, storage: int, sizes: list[int]) -> None:
        if sizes[storage]:
            self.places[storage] = self.allocator.malloc(sizes[storage])


class CachingAllocator:
    """`malloc` gives a block's address, `free` takes it. `capacity` bounds the bytes reserved (None: no bound)."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self._blocks: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {
            True: [],
            False: [],
        }  # small or not -> (size, address), sorted
        self._next = 0

    def malloc(self, size: int) -> int:
        """Address of a block for `size` bytes. Raises OutOfMemory."""
        size = max(UNIT, -(-size // UNIT) * UNIT)
        small = size <= SMALL
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))  # the smallest free block that is large enough
        address = pool.pop(place)[1] if place < len(pool) else self._segment(size, small)
        block = self._blocks[address]
        rest = block.size - size
        if rest >= UNIT if small else rest > SMALL:  # a smaller rest stays with the tensor
            self._blocks[address + size] = _Block(rest, small, address, block.next)
            if block.next is not None:
                self._blocks[block.next].previous = address + size
            block.size, block.next = size, address + size
            insort(pool, (rest, address + size))
        block.used = True
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return address

    def free(self, address: int) -> None:
        """Give a block back; it merges with free neighbours of its segment."""
        block = self._blocks[address]
        block.used = False
        self.allocated -= block.size
        pool = self._free[block.small]
        if block.next is not None and not self._blocks[block.next].used:
            _remove(pool, (self._blocks[block.next].size, block.next))
            self._join(address)
        if block.previous is not None and not self._blocks[block.previous].used:
            address = block.previous
            _remove(pool, (self._blocks[address].size, address))
            self._join(address)
        insort(pool, (self._blocks[address].size, address))

    def reset_peaks(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def _segment(self, size: int, small: bool) -> int:
        whole = (
            SMALL_SEGMENT
            if small
            else LARGE_SEGMENT
            if size < LARGE_TENSOR
            else -(-size // ROUND) * ROUND
        )
        if self.capacity is not None and self.reserved + whole > self.capacity:
            self._give_back()
            if self.reserved + whole > self.capacity:
                raise CapacityExceeded(
                    f"{whole} bytes more than the {self.capacity} that there are, {self.allocated} of them used."
                )
        address, self._next = self._next, self._next + whole + UNIT  # a gap: segments never merge
        self._blocks[address] = _Block(whole, small, None, None)
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)
        return address

    def _join(self, address: int) -> None:
        """Let a block take in the next one of its segment."""
        block = self._blocks[address]
        taken = self._blocks.pop(block.next)
        block.size, block.next = block.size + taken.size, taken.next
        if taken.next is not None:
            self._blocks[taken.next].previous = address

    def _give_back(self) -> None:
        """Give every segment that nothing lives in back to the driver, as PyTorch does before it fails."""
        for pool in self._free.values():
            kept = []
            for size, address in pool:
                block = self._blocks[address]
                if block.previous is None and block.next is None:
                    self.reserved -= size
                    del self._blocks[address]
                else:
                    kept.append((size, address))
            pool[:] = kept


@dataclass
class _Block:
    size: int
    small: bool
    previous: int | None  # addresses of its neighbours in the segment
    next: int | None
    used: bool = False


def _remove(pool: list[tuple[int, int]], item: tuple[int, int]) -> None:
    del pool[bisect_left(pool, item)]

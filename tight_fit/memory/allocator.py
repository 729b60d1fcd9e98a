"""PyTorch's CUDA caching allocator, simulated.

It gives what `torch.cuda.max_memory_allocated` and `max_memory_reserved` would report.

A plan counts bytes of tensors. A GPU counts blocks: the allocator takes large segments from the
driver, cuts blocks from them, merges free neighbours, and keeps what it has. A block may be up to
1 MiB larger than its tensor, so "allocated" is more than the tensors. A free block may be too small
for the next tensor, so "reserved" is more than allocated. Both follow from the order in which
tensors are made and freed, which a plan knows.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings (no expandable
segments, no rounding to powers of two), for one stream. Each stream has pools of its own, so that
what another one holds, such as the one on which FSDP gathers parameters, is replayed by itself
(`AllocationTrace.only`). The real GPU whose peaks the
simulation is compared with (benchmarks/published_peaks.py) ran PyTorch 2.11.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tight_fit.gpus import WORKSPACE
from tight_fit.units import GIB, MIB

# Bytes. The names in parentheses are those of CUDACachingAllocator.cpp.
UNIT = 512  # every block is a multiple of it (kMinBlockSize)
SMALL = MIB  # tensors up to this size have a pool of their own (kSmallSize)
SMALL_SEGMENT = 2 * MIB  # (kSmallBuffer)
LARGE_SEGMENT = 20 * MIB  # for tensors under 10 MiB (kLargeBuffer)
LARGE_TENSOR = 10 * MIB  # from this size on a tensor has a segment of its own (kMinLargeAlloc)
ROUND = 2 * MIB  # to whose multiples such a segment is rounded up (kRoundLarge)

MAX_STEPS = 6  # as a rule nothing new is reserved from the third step on
OPTIMIZER = 2  # the phase in which the first step makes the optimizer's states


class CapacityExceeded(RuntimeError):
    """The simulated GPU is full, even after every unused segment went back to the driver."""


@dataclass(frozen=True, eq=False)
class AllocationTrace:
    """Births and deaths of storages in order: the calls that an allocator gets in a steady step.

    sizes   int64 [storages], bytes asked for
    given   int32 [n], the storages that exist before the first step: parameters and buffers
    states  int32 [m], those that the first optimizer step adds and that stay: its states
    moves   int32 [events], storage + 1 where a storage is born, -(storage + 1) where it dies
    phases  int8 [events], 0 forward, 1 backward, 2 optimizer
    """

    sizes: np.ndarray
    given: np.ndarray
    states: np.ndarray
    moves: np.ndarray
    phases: np.ndarray

    def only(self, storages: np.ndarray) -> AllocationTrace:
        """The calls for some storages, such as those of one stream; bool [storages]."""
        moved = storages[np.abs(self.moves) - 1]
        return AllocationTrace(
            self.sizes,
            self.given[storages[self.given]],
            self.states[storages[self.states]],
            self.moves[moved],
            self.phases[moved],
        )

    @cached_property
    def blocks(self) -> list[int]:
        """Bytes of the block that each storage asks for, 0 for one without bytes."""
        rounded: list[int] = (-(-self.sizes // UNIT) * UNIT).tolist()
        return rounded

    @cached_property
    def calls(self) -> list[tuple[int, int]]:
        """(move, phase) of each event."""
        return list(zip(self.moves.tolist(), self.phases.tolist()))

    @cached_property
    def unlimited(self) -> AllocatorPeaks:
        """The peaks with cuBLAS's usual workspaces and without a limit."""
        return replay(self, WORKSPACE)

    @cached_property
    def least(self) -> int:
        """Bytes that an allocator must be able to reserve for the step to run.

        It is exact to a thousandth (or 2 MiB) and includes cuBLAS's two workspaces (8.125 MiB
        each). Without a limit the allocator reserves more; at the limit it first gives back the
        segments that it keeps unused.
        """
        while self._look_between():
            pass
        return self._bounds[1]

    def beside(self, limit: int) -> int:
        """Bytes on the same side of a limit as `least`, which take fewer replays."""
        while self._bounds[0] < limit < self._bounds[1] and self._look_between():
            pass
        return self._bounds[1]

    @cached_property
    def _bounds(self) -> list[int]:
        """[bytes that do not suffice, or no less than are allocated; bytes that do]."""
        return [self.unlimited.allocated, self.unlimited.reserved]

    def _look_between(self) -> bool:
        """Bring the bounds closer together; False where they are close."""
        low, high = self._bounds
        if high - low <= max(ROUND, self.unlimited.allocated >> 10):
            return False
        middle = (low + high) // 2
        try:
            self._bounds[1] = replay(self, WORKSPACE, middle).reserved
        except CapacityExceeded:
            self._bounds[0] = middle
        return True


@dataclass(frozen=True)
class AllocatorPeaks:
    """The peaks of a steady step, in bytes.

    allocated  in blocks that hold tensors (`torch.cuda.max_memory_allocated`)
    reserved   taken from the driver (`torch.cuda.max_memory_reserved`)
    """

    allocated: int
    reserved: int

    def __str__(self) -> str:
        return f"{self.allocated / GIB:.2f} GiB allocated, {self.reserved / GIB:.2f} GiB reserved"


def replay(
    allocation_trace: AllocationTrace, workspace: int = 0, capacity: int | None = None
) -> AllocatorPeaks:
    """The peaks of a step that is repeated until the allocator reserves nothing new.

    With a capacity the first steps may reserve more than those after them; the most that any of
    them reserved is what counts.

    workspace  bytes of each of cuBLAS's two workspaces: one is allocated in the first forward pass,
               one in the first backward pass
    capacity   bytes that the allocator may reserve, None for no limit
    Raises CapacityExceeded where the capacity does not suffice.
    """
    process = _Process(allocation_trace, workspace, capacity)
    most = -1
    for _ in range(MAX_STEPS):
        peaks = process.step(allocation_trace)
        if peaks.reserved <= most:
            break
        most = peaks.reserved
    return AllocatorPeaks(peaks.allocated, most)


def replay_all(
    allocation_traces: Iterable[AllocationTrace], workspace: int = 0
) -> list[AllocatorPeaks]:
    """The peaks of steps of the same kind and of different sizes, one after the other.

    Such are batches of different lengths. `reserved` is the most that was reserved up to the end of
    that step. `workspace` is as for `replay`.
    """
    peaks: list[AllocatorPeaks] = []
    process = None
    for allocation_trace in allocation_traces:
        process = process or _Process(allocation_trace, workspace)
        peaks.append(process.step(allocation_trace))
    return peaks


class _Process:
    """An allocator during several steps, with the storages that stay from one to the next."""

    def __init__(
        self, allocation_trace: AllocationTrace, workspace: int, capacity: int | None = None
    ):
        self.allocator, self.workspace = CachingAllocator(capacity), workspace
        self.held: dict[int, _Block] = {}  # storage -> block
        self.last_phase = -1  # the last phase of the first step that has begun
        for storage in allocation_trace.given.tolist():
            self._born(storage, allocation_trace.blocks)
        self.lasting = set(self.held)

    def step(self, allocation_trace: AllocationTrace) -> AllocatorPeaks:
        """Run one step and return its peaks. Raises CapacityExceeded."""
        sizes, allocator, held = allocation_trace.blocks, self.allocator, self.held
        take, give = allocator.take, allocator.give
        allocator.reset_peaks()
        for move, phase in allocation_trace.calls:
            if phase > self.last_phase:
                self._begin_phases(phase, allocation_trace)
            if move > 0:
                if size := sizes[move - 1]:
                    held[move - 1] = take(size)
            elif (block := held.pop(-move - 1, None)) is not None:
                give(block)
        for storage in held.keys() - self.lasting:  # what the step returns, its loss
            give(held.pop(storage))
        return AllocatorPeaks(allocator.most_allocated, allocator.most_reserved)

    def _begin_phases(self, last: int, allocation_trace: AllocationTrace) -> None:
        """Allocate what stays from the first time on that each phase up to the last is entered."""
        while self.last_phase < last:
            self.last_phase += 1
            if self.last_phase < OPTIMIZER and self.workspace:
                self.allocator.malloc(self.workspace)
            elif self.last_phase == OPTIMIZER:
                for storage in allocation_trace.states.tolist():
                    self._born(storage, allocation_trace.blocks)
                    self.lasting.add(storage)

    def _born(self, storage: int, sizes: list[int]) -> None:
        if sizes[storage]:
            self.held[storage] = self.allocator.take(sizes[storage])


class CachingAllocator:
    """`malloc` returns the address of a block, `free` takes it back.

    capacity  bytes that may be reserved, None for no limit
    """

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self._used: dict[int, _Block] = {}  # those that `malloc` gave
        self._segments: dict[int, _Block] = {}  # address -> its first block
        # is it the pool of small blocks? -> its free blocks as (size, address, block), sorted
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._next = 0

    def malloc(self, size: int) -> int:
        """Address of a block for `size` bytes. Raises CapacityExceeded."""
        block = self.take(_round_up(max(UNIT, size), UNIT))
        self._used[block.address] = block
        return block.address

    def free(self, address: int) -> None:
        """Give a block back; it merges with the free neighbours in its segment."""
        self.give(self._used.pop(address))

    def take(self, size: int) -> _Block:
        """A block for a multiple of `UNIT` bytes, which `give` takes back. Raises
        CapacityExceeded."""
        small = size <= SMALL
        pool = self._free[small]
        index = bisect_left(pool, (size,))  # the smallest free block that is large enough
        block = pool.pop(index)[2] if index < len(pool) else self._segment(size, small)
        rest = block.size - size
        if rest >= UNIT if small else rest > SMALL:  # a smaller rest stays with the tensor
            address, following = block.address + size, block.next
            block.next = left = _Block(address, rest, small, block, following)
            if following is not None:
                following.previous = left
            block.size = size
            insort(pool, (rest, address, left))
        block.used = True
        self.allocated += block.size
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        return block

    def give(self, block: _Block) -> None:
        """Give a block of `take` back, as `free` does."""
        self.allocated -= block.size
        pool = self._free[block.small]
        block.used = False
        following, previous = block.next, block.previous
        if following is not None and not following.used:
            del pool[bisect_left(pool, (following.size, following.address))]
            _join(block, following)
        if previous is not None and not previous.used:
            del pool[bisect_left(pool, (previous.size, previous.address))]
            _join(previous, block)
            block = previous
        insort(pool, (block.size, block.address, block))

    def segments(self) -> list[list[tuple[int, int, bool]]]:
        """The blocks of each segment that is held, in their order: (address, bytes, used)."""
        held: list[list[tuple[int, int, bool]]] = []
        for first in self._segments.values():
            held.append([])
            block: _Block | None = first
            while block is not None:
                held[-1].append((block.address, block.size, block.used))
                block = block.next
        return held

    def reset_peaks(self) -> None:
        """Count peaks from here on, as `torch.cuda.reset_peak_memory_stats` does."""
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def _segment(self, size: int, small: bool) -> _Block:
        """A new segment from the driver, as one block for `size` bytes."""
        if small:
            segment = SMALL_SEGMENT
        elif size < LARGE_TENSOR:
            segment = LARGE_SEGMENT
        else:
            segment = _round_up(size, ROUND)
        if self.capacity is not None and self.reserved + segment > self.capacity:
            self.give_back()
            if self.reserved + segment > self.capacity:
                raise CapacityExceeded(
                    f"{segment} bytes more than the {self.capacity} that there are, "
                    f"{self.allocated} of them used."
                )
        address = self._next
        self._next += segment + UNIT  # a gap, since blocks of two segments never merge
        self._segments[address] = block = _Block(address, segment, small, None, None)
        self.reserved += segment
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def give_back(self) -> None:
        """Give every wholly free segment back to the driver: `torch.cuda.empty_cache`.

        PyTorch does so as well before it fails.
        """
        for pool in self._free.values():
            kept = []
            for free in pool:
                size, address, block = free
                if block.previous is None and block.next is None:
                    self.reserved -= size
                    del self._segments[address]
                else:
                    kept.append(free)
            pool[:] = kept


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int  # bytes
    small: bool
    previous: _Block | None  # its neighbours in the segment
    next: _Block | None
    used: bool = False


def _join(block: _Block, following: _Block) -> None:
    """Let a block take in the one that follows it in its segment."""
    block.size += following.size
    block.next = further = following.next
    if further is not None:
        further.previous = block


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit

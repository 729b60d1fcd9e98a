"""The simulated caching allocator against a plain one, and on plans."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plan import plan
from helpers.recipe import Recipe
from tight_fit.gpus import CONTEXT, MARGIN, WORKSPACE, find
from tight_fit.memory.allocator import (
    UNIT,
    AllocationTrace,
    AllocatorPeaks,
    CachingAllocator,
    CapacityExceeded,
    replay,
)
from tight_fit.units import KIB, MIB


@dataclass
class Plain:
    """The allocator's rules as documented, in a list of segments, each a list of [bytes, used]."""

    segments: list

    def malloc(self, asked: int) -> list:
        asked = max(512, (asked + 511) // 512 * 512)
        small = asked <= MIB
        fitting = [
            (block[0], number, index)
            for number, (pool, blocks) in enumerate(self.segments)
            if pool == small
            for index, block in enumerate(blocks)
            if not block[1] and block[0] >= asked
        ]
        if not fitting:
            large = 20 * MIB if asked < 10 * MIB else -(-asked // (2 * MIB)) * 2 * MIB
            whole = 2 * MIB if small else large
            self.segments.append((small, [[whole, False]]))
            fitting = [(whole, len(self.segments) - 1, 0)]
        _, number, index = min(fitting)
        blocks = self.segments[number][1]
        block = blocks[index]
        rest = block[0] - asked
        if (small and rest) or (not small and rest > MIB):
            block[0] = asked
            blocks.insert(index + 1, [rest, False])
        block[1] = True
        return block

    def free(self, block: list) -> None:
        block[1] = False
        for _, blocks in self.segments:
            index = 0
            while index + 1 < len(blocks):
                if not blocks[index][1] and not blocks[index + 1][1]:
                    blocks[index][0] += blocks.pop(index + 1)[0]
                else:
                    index += 1

    @property
    def allocated(self) -> int:
        return sum(size for _, blocks in self.segments for size, used in blocks if used)

    @property
    def reserved(self) -> int:
        return sum(size for _, blocks in self.segments for size, _ in blocks)


SIZES = st.one_of(
    st.integers(1, 5000),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 30 * MIB),
    st.sampled_from([512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB, 19 * MIB]),
)


@settings(max_examples=150, deadline=None)
@given(wishes=st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=60))
def test_the_same_as_a_plain_one(wishes):
    """Addresses decide between equal blocks, in both: the oldest segment first, from its front."""
    quick, plain, alive = CachingAllocator(), Plain([]), []
    for is_free, size, which in wishes:
        if is_free and alive:
            block, same_block = alive.pop(which % len(alive))
            quick.free(block)
            plain.free(same_block)
        else:
            alive.append((quick.malloc(size), plain.malloc(size)))
        assert (quick.allocated, quick.reserved) == (plain.allocated, plain.reserved)
        assert quick.most_allocated >= quick.allocated and quick.most_reserved >= quick.reserved
    for block, _ in alive:
        quick.free(block)
    assert quick.allocated == 0
    assert all(len(blocks) == 1 for blocks in quick.segments()), "segments whole again"


def test_free_memory_that_does_not_lie_together():
    """Thirty free MiB in three segments cannot hold twenty-one, and go back to the driver."""
    cuda = CachingAllocator(capacity=60 * MIB)
    blocks = [cuda.malloc(10 * MIB) for _ in range(6)]
    assert cuda.reserved == 60 * MIB
    for block in blocks[3:]:
        cuda.free(block)
    message = "the 62914560 that there are, 31457280 of them used"
    with pytest.raises(CapacityExceeded, match=message):
        cuda.malloc(31 * MIB)
    assert cuda.reserved == 30 * MIB and cuda.malloc(21 * MIB) is not None
    assert cuda.reserved == 52 * MIB


def test_a_step_is_repeated_until_nothing_new_is_reserved():
    """A parameter of 4 MiB, a state as large from the first step on, and a step that needs 3 MiB
    and returns 512 bytes."""
    trace = AllocationTrace(
        np.array([4 * MIB, 4 * MIB, 3 * MIB, 100, 0]), np.array([0]), np.array([1]),
        np.array([3, 5, 4, -3], dtype=np.int32), np.array([0, 0, 1, 2], dtype=np.int8),
    )  # fmt: skip
    assert replay(trace) == AllocatorPeaks(11 * MIB + 512, 22 * MIB)
    # The workspaces leave 5 MiB in the first segment; the state, which comes last, takes them all.
    assert replay(trace, workspace=8 * MIB) == AllocatorPeaks(28 * MIB + 512, 42 * MIB)
    with pytest.raises(CapacityExceeded):
        replay(trace, capacity=21 * MIB)


CASES = {
    "deberta mini fp16": Recipe(batch_size=8, length=32, accumulation=4, precision="fp16"),
    "vit full fp32": Recipe("vit", profile="full", batch_size=8, checkpointing=True),
}


@pytest.mark.parametrize("recipe", CASES.values(), ids=CASES)
def test_a_plan_on_a_gpu(recipe):
    planned = plan(recipe)
    peaks, tensors = planned.allocator_peaks("T4"), planned.peak + 2 * WORKSPACE
    assert tensors <= peaks.allocated <= peaks.reserved
    most = 1.05 * planned.peak + 2 * WORKSPACE + 8 * MIB
    assert peaks.allocated < most, "blocks are little more than their tensors"
    least = planned.allocation_trace.least
    assert tensors <= least <= peaks.reserved
    assert replay(planned.allocation_trace, WORKSPACE, least).reserved <= least
    for limit in (peaks.allocated, least - UNIT, least - 1, least, peaks.reserved):
        again = replace(planned.allocation_trace)  # nothing is known of it yet
        assert (again.beside(limit) <= limit) == (least <= limit) and again.least == least
    with pytest.raises(CapacityExceeded):
        replay(planned.allocation_trace, WORKSPACE, peaks.allocated - 512)
    room = find("T4")._replace(memory=least + CONTEXT + int(MARGIN * planned.peak))
    assert planned.fits(room) and planned.fits(room).over == 0
    assert not planned.fits(room._replace(memory=room.memory - KIB))


def test_a_cpu_has_none():
    recipe = Recipe(model="vit", batch_size=8)
    with pytest.raises(ValueError, match="CPU has no caching allocator"):
        plan(recipe, "cpu").allocator_peaks("T4")
    with pytest.raises(ValueError, match="GTX 9999"):
        plan(recipe).allocator_peaks("GTX 9999")


def test_segments_are_named_block_by_block():
    allocator = CachingAllocator()
    first, second = allocator.malloc(600), allocator.malloc(512)
    rest = 2 * MIB - 1024 - 512
    blocks = [(first, 1024, True), (second, 512, True), (second + 512, rest, False)]
    assert allocator.segments() == [blocks]
    allocator.free(first)
    assert allocator.segments() == [[(first, 1024, False), *blocks[1:]]]
    large = allocator.malloc(10 * MIB)
    assert allocator.segments()[1] == [(large, 10 * MIB, True)]

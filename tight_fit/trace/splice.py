"""The trace of a whole step from the trace of a step in which repeated layers were left out.

A model's layers are mostly alike, so that what happens to storages in one block of them happens in
each. Two such blocks next to each other are traced; where they do the same, event by event, `whole`
repeats what they do as often as blocks were left out. It raises `NotAlike` where it cannot prove
that they do the same: the step is then traced with all layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tight_fit.trace.storage_trace import BORN, DIES, MARK, Event, StorageTrace, deaths_sorted


class NotAlike(Exception):
    """Two blocks of layers do not do the same, or it cannot be seen that they do."""


class Mark(NamedTuple):
    """A point of the step, between two blocks of layers.

    stack       number of the stack of layers
    edge        0 before the first of the two blocks, 1 between them, 2 after the second
    operations  recorded up to here
    flops       counted up to here, {phase: FLOPs}
    """

    stack: int
    edge: int
    operations: int
    flops: dict[str, int]


class _Place(NamedTuple):
    """Where a storage was born: in which region, in which of its blocks, as which one there."""

    region: int
    block: int
    number: int


@dataclass
class _Region:
    """The two blocks of a stack in one forward or backward pass.

    marks   its three marks in the order of time
    points  their events
    blocks  the numbers of its blocks in the order of time: (0, 1), backwards (1, 0)
    left_out  number of blocks that were left out
    """

    marks: list[Mark]
    points: list[int]
    blocks: tuple[int, int]
    left_out: int

    def events(self, block: int) -> range:
        """The events of block 0 or 1."""
        begin = self.blocks.index(block)
        return range(self.points[begin] + 1, self.points[begin + 1])

    def operations(self, block: int) -> slice:
        """The same of the recorded operations."""
        begin = self.blocks.index(block)
        return slice(self.marks[begin].operations, self.marks[begin + 1].operations)

    def flops(self, block: int) -> dict[str, int]:
        """{phase: FLOPs} of a block."""
        begin = self.blocks.index(block)
        before, after = self.marks[begin].flops, self.marks[begin + 1].flops
        return {name: count - before.get(name, 0) for name, count in after.items()}


def whole(
    trace: StorageTrace,
    marks: Sequence[Mark],
    left_out: Sequence[int],
    stand_ins: Collection[int],
    joined: Sequence[Sequence[int]],
) -> tuple[StorageTrace, list[tuple[int, int]]]:
    """The trace with all layers, and where operations were put in: (position, their number).

    trace      of the step without them, with an event (MARK, number of the mark, 0, phase) for each
               of `marks`
    left_out   for each stack the number of blocks that were left out
    stand_ins  storages that stand for the gradients of the layers left out
    joined     the storages that an operation read at once, for each that joins many tensors
    Raises NotAlike.
    """
    splice = _Splice(trace, _regions(trace.events, marks, left_out), frozenset(stand_ins))
    splice.check_joined(joined)
    result = splice.storages()
    inserted = splice.operations(result)
    splice.flops(result)
    return result, inserted


def _regions(
    events: Sequence[Event], marks: Sequence[Mark], left_out: Sequence[int]
) -> list[_Region]:
    found: list[_Region] = []
    open_one: list[tuple[int, Mark]] = []
    for index, (kind, number, _, _) in enumerate(events):
        if kind != MARK:
            continue
        open_one.append((index, marks[number]))
        if len(open_one) == 3:
            points, three = [point for point, _ in open_one], [mark for _, mark in open_one]
            edges = [mark.edge for mark in three]
            if edges not in ([0, 1, 2], [2, 1, 0]) or len({mark.stack for mark in three}) > 1:
                raise NotAlike("The layers did not run one after another.")
            blocks = (0, 1) if edges[0] == 0 else (1, 0)
            found.append(_Region(three, points, blocks, left_out[three[0].stack]))
            open_one = []
    forward = [region.marks[0].stack for region in found if region.blocks == (0, 1)]
    backward = [region.marks[0].stack for region in found if region.blocks == (1, 0)]
    rounds = len(forward) // max(1, len(left_out))
    if (
        open_one
        or not rounds
        or any(
            passes.count(stack) != rounds
            for passes in (forward, backward)
            for stack in range(len(left_out))
        )
    ):
        raise NotAlike("Some layers did not run, or no gradient came back to them.")
    return found


class _Splice:
    """The work of `whole`. A new storage is named (storage, copy): copies 0 and 1 are the blocks
    that were traced, with 1 for the last of all, and the others are in between."""

    def __init__(self, trace: StorageTrace, regions: list[_Region], stand_ins: frozenset[int]):
        self.trace, self.regions, self.stand_ins = trace, regions, stand_ins
        self.places: dict[int, _Place] = {}
        self.storage_at: dict[_Place, int] = {}
        for number, region in enumerate(regions):
            for block in (0, 1):
                born = [
                    trace.events[index][1]
                    for index in region.events(block)
                    if trace.events[index][0] == BORN
                ]
                for order, storage in enumerate(born):
                    place = _Place(number, block, order)
                    self.places[storage] = place
                    self.storage_at[place] = storage
        self.deaths = {
            storage: index
            for index, (kind, storage, _, _) in enumerate(trace.events)
            if kind == DIES
        }
        self.runs: list[int] = []  # for each event the number of the run of deaths that it is in
        run = 0
        for kind, *_ in trace.events:
            run += kind != DIES
            self.runs.append(run)

    # -- storages ----------------------------------------------------------------------------------

    def storages(self) -> StorageTrace:
        """The trace with all layers, without its operations and FLOPs."""
        events, regions = self.trace.events, iter(self.regions)
        numbers: dict[tuple[int, int], int] = {}  # (storage, copy) -> its number in the result
        result = replace(self.trace, bytes=[], made_by=[], events=[], flops={})

        def emit(kind: int, name: tuple[int, int], category: int, phase: int) -> None:
            if kind == BORN:
                if name in numbers:
                    raise NotAlike("A storage is born twice.")
                numbers[name] = len(result.bytes)
                result.bytes.append(self.trace.bytes[name[0]])
                result.made_by.append(self.trace.made_by[name[0]])
            elif name not in alive:
                raise NotAlike("A storage dies twice.")
            (alive.discard if kind == DIES else alive.add)(name)
            result.events.append((kind, numbers[name], category, phase))

        alive: set[tuple[int, int]] = set()
        index, region = 0, next(regions, None)
        while index < len(events):
            if region is not None and index == region.points[0]:
                for event in self._repeated(region):
                    emit(*event)
                index, region = region.points[-1] + 1, next(regions, None)
                continue
            for event in self._outside(index):
                emit(*event)
            index += 1
        if any(name[0] in self.places for name in alive):
            raise NotAlike("A storage of a layer outlives the step.")
        result.events = deaths_sorted(result.events)
        return result

    def _repeated(self, region: _Region) -> Iterator[tuple[int, tuple[int, int], int, int]]:
        """The events of all blocks of a region, in the order of time."""
        first, second = region.events(0), region.events(1)
        if len(first) != len(second):
            raise NotAlike("Two blocks differ in the number of their events.")
        pairs = [self._pair(a, b) for a, b in zip(first, second)]
        last = region.left_out + 1
        blocks = range(last + 1)
        for block in blocks if region.blocks == (0, 1) else reversed(blocks):
            for (kind, category, phase), at_first, at_last, storage, step in pairs:
                if (step < 0 and block == 0) or (step > 0 and block == last):
                    # Only the first and the last block refer to what lies outside of all blocks.
                    name = self._literal(at_first if block == 0 else at_last, last)
                else:
                    name = self._named(storage, block + step, last)
                yield kind, name, category, phase

    def _pair(self, first: int, second: int):
        """What the same event of the two blocks says of a block: kind, category and phase; the
        storages in the first and in the last block; and a storage with the distance of its block.
        """
        kind, storage, category, phase = self.trace.events[first]
        other_kind, other, *rest = self.trace.events[second]
        sizes = self.trace.bytes
        if (kind, category, phase) != (other_kind, *rest) or sizes[storage] != sizes[other]:
            raise NotAlike("Two blocks differ in an event.")
        if kind == BORN and self.trace.made_by[storage] != self.trace.made_by[other]:
            raise NotAlike("Two blocks differ in an operation.")
        place, there = self.places.get(storage), self.places.get(other)
        what = kind, category, phase
        if place and there:
            same = (place.region, place.number) == (there.region, there.number)
            if same and (place.block, there.block) == (0, 1):
                return what, storage, other, storage, 0
        elif there and there.block == 0:  # each block refers to the one before
            return what, storage, other, other, -1
        elif place and place.block == 1:  # each block refers to the one after
            return what, storage, other, storage, +1
        raise NotAlike("Two blocks refer to different storages.")

    def _named(self, storage: int, block: int, last: int) -> tuple[int, int]:
        """The name of the storage that is in a block what `storage` is in its own."""
        place = self.places[storage]
        if block == 0:
            return self.storage_at[place._replace(block=0)], 0
        return self.storage_at[place._replace(block=1)], 1 if block == last else block + 1

    def _literal(self, storage: int, last: int) -> tuple[int, int]:
        place = self.places.get(storage)
        return (storage, 0) if place is None else self._named(storage, place.block * last, last)

    def _outside(self, index: int) -> Iterator[tuple[int, tuple[int, int], int, int]]:
        """What an event outside of all blocks becomes: nothing, itself, or a death in each copy."""
        kind, storage, category, phase = self.trace.events[index]
        if kind == MARK or storage in self.stand_ins:
            return
        place = self.places.get(storage)
        if place is None:
            yield kind, (storage, 0), category, phase
            return
        if kind != DIES:
            raise NotAlike("A storage of a layer changes its category outside of the layers.")
        last = self.regions[place.region].left_out + 1
        yield kind, self._literal(storage, last), category, phase
        if place.block == 0:
            return
        death = self.deaths.get(self.storage_at[place._replace(block=0)])
        if death is None:
            raise NotAlike("Of two blocks only one frees a storage.")
        if not any(death in region.events(block) for region in self.regions for block in (0, 1)):
            if self.runs[death] != self.runs[index]:
                raise NotAlike("Two blocks free a storage at different moments.")
            for block in range(1, last):
                yield kind, self._named(storage, block, last), category, phase

    def check_joined(self, joined: Sequence[Sequence[int]]) -> None:
        """Raises NotAlike where an operation outside of the layers reads what both blocks made.

        The size of its result depends on the number of layers.
        """
        for storages in joined:
            places = [place for place in map(self.places.get, storages) if place]
            if {place.block for place in places} == {0, 1}:
                raise NotAlike("What several layers made is joined.")

    # -- operations and FLOPs ----------------------------------------------------------------------

    def operations(self, result: StorageTrace) -> list[tuple[int, int]]:
        """Give the result the operations of all layers; where they were put in, and how many."""
        traced = self.trace.operations
        if traced is None:
            return []
        order, inserted, pieces, begin = traced.order, [], [], 0
        for region in self.regions:
            block = order[region.operations(1)]
            if block != order[region.operations(0)]:
                raise NotAlike("Two blocks differ in their operations.")
            end = region.marks[1].operations
            pieces += [order[begin:end], block * region.left_out]
            inserted.append((end, len(block) * region.left_out))
            begin = end
        order = [operation for piece in (*pieces, order[begin:]) for operation in piece]
        result.operations = replace(traced, order=order)
        return inserted

    def flops(self, result: StorageTrace) -> None:
        """Give the result the FLOPs of all layers."""
        result.flops = dict(self.trace.flops)
        for region in self.regions:
            if region.flops(0) != region.flops(1):
                raise NotAlike("Two blocks differ in their FLOPs.")
            for name, count in region.flops(1).items():
                result.flops[name] += count * region.left_out

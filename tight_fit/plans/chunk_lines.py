"""The trace of a step whose loss is computed in chunks of tokens, with fewer or more of them.

The operations of such a step change with its sizes, as its number of chunks does. All but the first
and the last do the same, so that a trace with `FEW` of them gives that with any number from two on:
the part of a chunk is put in again, or left out. Nothing here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tight_fit.plans.living import Living
from tight_fit.trace.storage_trace import BORN, StorageTrace

FEW = 3  # chunks of the trace of a line: the first, the last and one between them
FEWEST = 2  # chunks for which a line is taken
LARGER = 8  # tokens that the chunks have more whose trace tells how they grow
Place = tuple[int, int | None]  # as in `trace_line`, which has the lines
Parts = list[list[int]]  # [index, length]: before the index lies the part of one chunk


def divided(tokens: int, least: int, most: int) -> tuple[int, int] | None:
    """(chunks, tokens of each), as `techniques.log_probs.tokens_in_chunk` divides them; None where
    they are not alike, or too few.

    least  tokens of the smallest chunk
    most   chunks at most
    """
    number, rest = divmod(tokens, least) if tokens < least * most else (most, tokens % most)
    return None if rest or number < FEWEST else (number, tokens // number)


def start_of(batch: int, least: int, most: int) -> tuple[int, int]:
    """The first length of the places of a line, and how much longer each further one is.

    These places have chunks of the least tokens, `FEW` and more. The second number of examples, or
    for one example the second length, has one more.
    """
    return least * FEW // batch, least


def larger(batch: int, least: int, most: int) -> Place:
    """The place whose trace tells how the sizes of a chunk grow with its tokens."""
    tokens = least + LARGER
    return (1, tokens * most) if batch == 1 else (most, tokens)


def beside(line: Mapping[str, Any], place: Place) -> tuple[int, dict[str, int]] | None:
    """(chunks beyond those of a line, {"chunk": tokens of one} where these are not the least) at a
    place; None where the line has none for it."""
    if "chunks" not in line:
        return 0, {}
    least, most = line["chunks"]["of"]
    split = divided(place[0] * (place[1] or 0), least, most)
    if split is None:
        return None
    return split[0] - FEW, {} if split[1] == least else {"chunk": split[1]}


def with_few(line: Mapping[str, Any], place: Place, trace: StorageTrace) -> StorageTrace:
    """A trace with as many chunks as that of a line; as it is where that is not possible."""
    more = beside(line, place)
    if more is None or more[0] <= 0:
        return trace
    return with_chunks(trace, line["chunks"]["parts"], -more[0], more[0]) or trace


def parts_of(fewer: StorageTrace, more: StorageTrace, regions: int) -> dict[str, Parts] | None:
    """Where the part of a chunk lies in the events, storages and operations of a trace with `FEW`
    chunks; None where they differ in more than that.

    more     a trace with one chunk more
    regions  losses in a step, one for each micro-batch that is traced
    """
    found = {}
    for name, one, other in zip(("events", "storages", "order"), _kinds(fewer), _kinds(more)):
        parts = _inserted(one, other, regions)
        if parts is None:
            return None
        found[name] = parts
    return found


def with_chunks(
    trace: StorageTrace, parts: dict[str, Parts], more: int, beyond: int = 0
) -> StorageTrace | None:
    """The trace with more chunks, or with fewer for a negative number.

    beyond  chunks that the trace has beyond `FEW`
    None where what would be left out is not what all other chunks do.
    """
    operations = trace.operations
    assert operations is not None, "a line has them"
    events = _changed(_told(trace), parts["events"], more, beyond)
    storages = _changed(list(zip(trace.bytes, trace.made_by)), parts["storages"], more, beyond)
    order = _changed(operations.order, parts["order"], more, beyond)
    if events is None or storages is None or order is None:
        return None
    begin, end, times = operations.again
    begin, end = (_moved(index, parts["order"], more, beyond) for index in (begin, end))
    return replace(
        trace,
        bytes=[size for size, _ in storages],
        made_by=[name for _, name in storages],
        events=_events(events),
        operations=replace(operations, order=order, again=(begin, end, times)),
    )


def _kinds(trace: StorageTrace) -> tuple[list[Any], list[Any], list[Any]]:
    """Events, storages and operations without sizes."""
    assert trace.operations is not None, "a line has them"
    ops = [
        tuple(
            (op.name, op.kind, op.arithmetic, op.layout, op.kernels, len(op.shape)) for op in some
        )
        for some in trace.operations.ops
    ]
    order = [(ops[index], phase) for index, phase in trace.operations.order]
    return _told(trace), trace.made_by, order


def _told(trace: StorageTrace) -> list[Any]:
    """The events without the numbers of storages (`Living`), each with its place, if it has one."""
    kinds, numbers, places = Living().follow(trace.events)
    left = iter(places)
    return [
        (kind, None if kind[0] == BORN else next(left))
        for kind in (tuple(kinds[number]) for number in numbers)
    ]


def _events(told: list[Any]) -> list[Any]:
    kinds: dict[tuple[int, ...], int] = {}
    numbers = [kinds.setdefault(kind, len(kinds)) for kind, _ in told]
    return Living().events(
        [[list(kind) for kind in kinds], numbers, [place for _, place in told if place is not None]]
    )


def _inserted(one: Sequence[Any], other: Sequence[Any], regions: int) -> Parts | None:
    """Where `other` has a part in addition that repeats what lies before it."""
    length, rest = divmod(len(other) - len(one), regions)
    if rest or length <= 0:
        return None
    parts: Parts = []
    ahead = 0
    for index in range(len(one) + 1):
        place = index + ahead
        if index < len(one) and one[index] == other[place]:
            continue
        if len(parts) == regions:
            return parts if index == len(one) else None
        part = other[place : place + length]
        if index < length or part != other[place - length : place]:
            return None
        parts.append([index, length])
        ahead += length
        if index < len(one) and one[index] != other[index + ahead]:
            return None
    return parts if len(parts) == regions else None


def _changed(items: Sequence[Any], parts: Parts, more: int, beyond: int) -> list[Any] | None:
    """The items with each part `more` times more often, or less often for a negative number.

    None where they differ among each other. `parts` are those of `FEW` chunks, and the items have
    each `beyond` times more often.
    """
    changed: list[Any] = []
    taken = 0
    for number, (index, length) in enumerate(parts):
        end = index + beyond * length * number
        part = list(items[end - length : end])
        if list(items[end : end + beyond * length]) != part * beyond:
            return None
        changed += items[taken : end - length]
        changed += part * (1 + beyond + more)
        taken = end + beyond * length
    return [*changed, *items[taken:]]


def _moved(index: int, parts: Parts, more: int, beyond: int) -> int:
    """The index that an operation of the order has after such a change."""
    moved = index
    for number, (part, length) in enumerate(parts):
        if index > part + beyond * length * number:
            moved += more * length
    return moved

"""A traced step as a list of short words, the same for layers that are alike.

A storage that dies is named by its place among those alive of its category, counted from the end
or from the begin, whichever is nearer. So the words of one layer are those of the next, and a
stream of thousands of words compresses to a few hundred bytes.

Words: "b", category and number of the size: a storage is born. "d", category and place: it dies.
"m", category, place and new category: it moves. "p" and a phase: from here on, this phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tight_fit.trace.storage_trace import BORN, DIES, MOVES, OPTIMIZER, StorageTrace
from tools.calculator.sizes import Shape, Size

FORWARD, UPDATE = 0, 2  # phases, as `tracker.PHASES` counts them


@dataclass
class StepStream:
    """The words of a step by section.

    parameters  what is there before the step, but for the optimizer's states
    states      the optimizer's states
    first       the first micro-batch
    second      the second one, where gradients are there already
    update      the optimizer's phase
    """

    parameters: list[str]
    states: list[str]
    first: list[str]
    second: list[str]
    update: list[str]


def write(trace: StorageTrace, number: Callable[[int], int]) -> StepStream:
    """The stream of a step of two micro-batches.

    number  the number of a size, from its bytes in the trace
    Raises ValueError for a trace that is none of such a step.
    """
    alive: list[list[int]] = [[] for _ in range(5)]
    category_of: dict[int, int] = {}
    stream = StepStream([], [], [], [], [])
    section, phase, micro_batches = stream.parameters, -1, 0
    for index, (kind, storage, category, now) in enumerate(trace.events):
        if index < trace.begin:
            if kind != BORN:
                raise ValueError("Before a step storages only appear.")
            section = stream.states if category == OPTIMIZER else stream.parameters
            if category != OPTIMIZER and stream.states:
                raise ValueError("Before a step the optimizer's states come last.")
        elif now != phase:
            if now == FORWARD:
                micro_batches += 1
                section = stream.first if micro_batches == 1 else stream.second
            elif now == UPDATE:
                section = stream.update
            section.append(f"p{now}")
            phase = now
        if kind == BORN:
            section.append(f"b{category}{number(trace.bytes[storage])}")
        else:
            old = category_of[storage]
            place = _place(alive[old], storage)
            alive[old].remove(storage)
            section.append(f"d{old}{place}" if kind == DIES else f"m{old}{category}{place}")
        if kind != DIES:
            alive[category].append(storage)
            category_of[storage] = category
    if micro_batches != 2:
        raise ValueError(f"A stream is made of two micro-batches, not of {micro_batches}.")
    return stream


def _place(alive: Sequence[int], storage: int) -> int:
    """Twice the place from the end, or twice the place from the begin and one."""
    begin = alive.index(storage)
    end = len(alive) - 1 - begin
    return 2 * end if end <= begin else 2 * begin + 1


def read(words: Sequence[str], sizes: Sequence[Size], shape: Shape) -> StorageTrace:
    """The trace that the words of all sections of a step tell, at a shape."""
    trace = StorageTrace()
    alive: list[list[int]] = [[] for _ in range(5)]
    phase, began = 0, False
    for word in words:
        kind, rest = word[0], word[1:]
        if kind == "p":
            if not began:
                trace.begin, began = len(trace.events), True
            phase = int(rest)
        elif kind == "b":
            category, storage = int(rest[0]), len(trace.bytes)
            trace.bytes.append(sizes[int(rest[1:])].at(shape))
            trace.made_by.append("")
            alive[category].append(storage)
            trace.events.append((BORN, storage, category, phase))
        else:
            old = int(rest[0])
            place = int(rest[1:] if kind == "d" else rest[2:])
            storage = alive[old].pop(place // 2 if place % 2 else -1 - place // 2)
            if kind == "d":
                trace.events.append((DIES, storage, old, phase))
            else:
                category = int(rest[1])
                alive[category].append(storage)
                trace.events.append((MOVES, storage, category, phase))
    return trace

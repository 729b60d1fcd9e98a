"""Events of a trace without the numbers of storages, so that layers that repeat are the same text.

Nothing here imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tight_fit.trace.storage_trace import BORN, DIES, Event


class Living:
    """The storages that exist, as events are followed.

    of    {category: its storages, the newest last}
    born  how many there have been
    """

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}
        self.born = 0
        self._category: dict[int, int] = {}

    def follow(self, events: Iterable[Event]) -> list[list[Any]]:
        """[kinds, the kind of each event, places] of events.

        A kind is (kind, category before, category, phase). A place tells which storage of the
        category before an event concerns that is no birth, counted from the newest. Storages are
        born in the order of their numbers.
        """
        kinds: dict[tuple[int, ...], int] = {}
        numbers, places = [], []
        for kind, storage, category, phase in events:
            before = category if kind == BORN else self._category[storage]
            numbers.append(kinds.setdefault((kind, before, category, phase), len(kinds)))
            if kind == BORN:
                self.add(storage, category)
                self.born += 1
                continue
            among = self.of[before]
            place = len(among) - 1
            while among[place] != storage:
                place -= 1
            places.append(len(among) - 1 - place)
            del among[place]
            if kind != DIES:
                self.add(storage, category)
        return [[list(kind) for kind in kinds], numbers, places]

    def events(self, packed: list[list[Any]]) -> list[Event]:
        """The events that `follow` told of, which are followed. Raises LookupError where a place
        has no storage."""
        kinds, numbers, places = packed
        left = iter(places)
        events = []
        for number in numbers:
            kind, before, category, phase = kinds[number]
            if kind == BORN:
                storage = self.born
                self.born += 1
            else:
                storage = self.of[before].pop(-1 - next(left))
            if kind != DIES:
                self.add(storage, category)
            events.append((kind, storage, category, phase))
        return events

    def add(self, storage: int, category: int) -> None:
        """A storage is there, in a category."""
        self.of.setdefault(category, []).append(storage)
        self._category[storage] = category

"""Streams of words, packed: what repeats is kept once, in chunks of words and chunks of chunks.

A chunk ends where its last two words say so, so that equal stretches are cut in the same places
wherever they stand, in one layer as in the next and in one model as in another.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

CUT = 12  # a chunk ends after one of so many pairs, so that this is about its length
Nested = dict[str, dict[str, list]]  # {family: {section: words, or numbers of chunks}}


class StreamChunks:
    """Two dictionaries: chunks of words, and chunks of those.

    levels  two lists of chunks; a chunk of the first is a text of words between spaces, one of the
            second a list of numbers of the first
    """

    def __init__(self, levels: Sequence[Sequence[Any]] = ((), ())):
        self._lists: list[list[tuple]] = [
            [tuple(text.split()) for text in levels[0]],
            [tuple(chunk) for chunk in levels[1]],
        ]
        self._numbers: list[dict[tuple, int]] = [
            {chunk: number for number, chunk in enumerate(level)} for level in self._lists
        ]

    def levels(self) -> list[list[Any]]:
        """The dictionaries, as JSON holds them."""
        return [[" ".join(chunk) for chunk in self._lists[0]], list(map(list, self._lists[1]))]

    def pack(self, streams: dict[str, dict[str, list[str]]]) -> Nested:
        """The streams as numbers of chunks; the dictionaries grow."""
        return {
            key: {name: self._packed(words) for name, words in sections.items()}
            for key, sections in streams.items()
        }

    def _packed(self, words: Sequence[str]) -> list[int]:
        inner = [self._number(0, chunk) for chunk in _cut(words)]
        return [self._number(1, chunk) for chunk in _cut(inner)]

    def _number(self, level: int, chunk: tuple) -> int:
        number = self._numbers[level].setdefault(chunk, len(self._lists[level]))
        if number == len(self._lists[level]):
            self._lists[level].append(chunk)
        return number

    def unpack(self, streams: Nested) -> dict[str, dict[str, list[str]]]:
        """The streams as words."""
        return {
            key: {
                name: [word for outer in numbers for word in self._words(outer)]
                for name, numbers in sections.items()
            }
            for key, sections in streams.items()
        }

    def _words(self, outer: int) -> list[str]:
        return [word for inner in self._lists[1][outer] for word in self._lists[0][inner]]


def _cut(items: Sequence[Any]) -> list[tuple]:
    chunks, chunk, before = [], [], None
    for item in items:
        chunk.append(item)
        if zlib.crc32(f"{before} {item}".encode()) % CUT == 0:
            chunks.append(tuple(chunk))
            chunk = []
        before = item
    return [*chunks, tuple(chunk)] if chunk else chunks

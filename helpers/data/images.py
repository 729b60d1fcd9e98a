"""The image sets: columns `image` (PIL, RGB) and `label` (ClassLabel), splits "train" and "test"."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Image, Split

from helpers import hub
from helpers.data.subset import proportional_order

DIGITS = tuple("0123456789")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_REPO = "uoft-cs/cifar10"
DIGITS_TEST = 500  # of 1,797; chosen once, the same for every seed


def digits() -> DatasetDict:
    """Handwritten digits, 8 x 8 pixels: 1,297 to train on and 500 to test, equal class shares in both.

    From scikit-learn's package. Grey levels 0 .. 16 become 0 .. 255, in three equal channels as in CIFAR-10.
    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository (1998).
    """
    from PIL import Image as pil
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels = np.rint(raw.images * (255 / 16)).astype(np.uint8)
    pictures = [pil.fromarray(square).convert("RGB") for square in pixels]
    order = proportional_order(raw.target, seed=0)
    rows = {"train": np.sort(order[DIGITS_TEST:]), "test": np.sort(order[:DIGITS_TEST])}
    features = _features(DIGITS)
    info = DatasetInfo(description="Digits, from scikit-learn", features=features)
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"image": [pictures[i] for i in keep], "label": raw.target[keep].tolist()},
                features=features,
                split=Split(split),
                info=info,
            )
            for split, keep in rows.items()
        }
    )


def cifar10() -> DatasetDict:
    """CIFAR-10: 50,000 training and 10,000 test photographs (a mirror may hold fewer), 32 x 32, ten classes.

    From the mirror, the cache or the hub. Raises hub.HubUnavailable where none has it, ValueError for other
    labels. Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", University of
    Toronto (2009).
    """
    import pyarrow.parquet

    found = hub.find("dataset", CIFAR10_REPO)
    origin = f"CIFAR-10, {CIFAR10_REPO} at {found.revision or 'an unnamed commit'}, from the {found.source}"
    features = _features(CIFAR10)
    splits = {}
    for split in ("train", "test"):
        table = pa.concat_tables(map(pyarrow.parquet.read_table, found.files(f"{split}*.parquet")))
        _check_names(table, found)
        images = table.column("img" if "img" in table.column_names else "image")
        labels = table.column("label").cast(pa.int64())
        outside = sorted(set(labels.to_pylist()) - set(range(len(CIFAR10))))
        if outside:
            raise ValueError(
                f"{found.path} has label {outside[0]}: CIFAR-10's labels go from 0 to 9."
            )
        table = pa.table({"image": images, "label": labels}).cast(features.arrow_schema)
        info = DatasetInfo(description=origin, features=features)
        splits[split] = Dataset(table.replace_schema_metadata(None), info=info, split=Split(split))
    return DatasetDict(splits)


def _features(names: tuple[str, ...]) -> Features:
    return Features(image=Image(), label=ClassLabel(names=list(names)))


def _check_names(table: pa.Table, found: hub.Found) -> None:
    """The class names that the file states, when it does, must be CIFAR-10's and in its order."""
    stated = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names = stated.get("info", {}).get("features", {}).get("label", {}).get("names")
    if names is not None and tuple(names) != CIFAR10:
        raise ValueError(f"{found.path} names its classes {', '.join(names)}: it is not CIFAR-10.")

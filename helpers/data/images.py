"""The image sets.

Their columns are `image` (PIL, RGB) and `label` (ClassLabel), their splits "train" and "test".
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, DatasetInfo, Features, Image, Split

from helpers.data.subset import proportional_order
from tight_fit.models import hub
from tight_fit.models.local import LocalCopy

DIGITS = tuple("0123456789")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_REPO = "uoft-cs/cifar10"
DIGITS_TEST = 500  # of 1,797; chosen once, the same for every seed


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
    features = _features(DIGITS)
    info = DatasetInfo(description="Digits, from scikit-learn", features=features)
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"image": [images[i] for i in indices], "label": raw.target[indices].tolist()},
                features=features,
                split=Split(split),
                info=info,
            )
            for split, indices in kept.items()
        }
    )


def cifar10() -> DatasetDict:
    """CIFAR-10: photographs of 32 x 32 pixels in ten classes, 50,000 to train and 10,000 to test.

    They come from the mirror (which may hold fewer), the cache or the hub. Raises
    hub.HubUnavailable where none of these has the set, ValueError for other labels.
    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", University of
    Toronto (2009).
    """
    import pyarrow.parquet

    copy = hub.find("dataset", CIFAR10_REPO)
    commit = copy.revision or "an unnamed commit"
    origin = f"CIFAR-10, {CIFAR10_REPO} at {commit}, from the {copy.source}"
    features = _features(CIFAR10)
    splits = {}
    for split in ("train", "test"):
        table = pa.concat_tables(map(pyarrow.parquet.read_table, copy.files(f"{split}*.parquet")))
        _check_names(table, copy)
        images = table.column("img" if "img" in table.column_names else "image")
        labels = table.column("label").cast(pa.int64())
        outside = sorted(set(labels.to_pylist()) - set(range(len(CIFAR10))))
        if outside:
            raise ValueError(
                f"{copy.path} has label {outside[0]}: CIFAR-10's labels go from 0 to 9."
            )
        table = pa.table({"image": images, "label": labels}).cast(features.arrow_schema)
        info = DatasetInfo(description=origin, features=features)
        splits[split] = Dataset(table.replace_schema_metadata(None), info=info, split=Split(split))
    return DatasetDict(splits)


def _features(names: tuple[str, ...]) -> Features:
    return Features(image=Image(), label=ClassLabel(names=list(names)))


def _check_names(table: pa.Table, copy: LocalCopy) -> None:
    """Raises ValueError for a file that states other class names, or in another order."""
    stated = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names = stated.get("info", {}).get("features", {}).get("label", {}).get("names")
    if names is not None and tuple(names) != CIFAR10:
        raise ValueError(f"{copy.path} names its classes {', '.join(names)}: it is not CIFAR-10.")

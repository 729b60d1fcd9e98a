"""The collator: batches as the library makes them, and bad documents refused in a sentence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from by_hand.collate import IGNORE, pad
from by_hand.padding import epoch_cost
from helpers.batching import padded_length

prop = settings(deadline=None, max_examples=60)
IDS = st.lists(st.integers(1, 99), min_size=1, max_size=40)


def tokenizer(side):
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0})),
        pad_token="[PAD]",
        padding_side=side,
    )


@prop
@given(
    st.lists(IDS, min_size=1, max_size=8),
    st.sampled_from(["left", "right"]),
    st.sampled_from([1, 8]),
    st.data(),
)
def test_the_collator_agrees_with_the_library_s(rows, side, multiple_of, data):
    labels = [data.draw(st.integers(0, 3)) for _ in rows]
    features = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels)]
    ours = pad(features, 0, multiple_of, side=side, classes=4)
    theirs = DataCollatorWithPadding(tokenizer(side), pad_to_multiple_of=multiple_of)(
        [dict(row) for row in features]
    )
    assert set(ours) == set(theirs)
    for name, values in ours.items():
        assert values.dtype == torch.int64 and torch.equal(values, theirs[name])
    tagged = [{"input_ids": row, "labels": [token % 3 for token in row]} for row in rows]
    ours = pad(tagged, 0, multiple_of, side=side)
    collator = DataCollatorForTokenClassification(tokenizer(side), pad_to_multiple_of=multiple_of)
    assert torch.equal(ours["labels"], collator([dict(row) for row in tagged])["labels"])
    assert (ours["labels"] == IGNORE).equal(ours["attention_mask"] == 0)


def documents(batch):
    """The tokens of each example, without padding."""
    pairs = zip(batch["input_ids"], batch["attention_mask"])
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


@prop
@given(
    st.lists(IDS, min_size=1, max_size=8),
    st.sampled_from(["left", "right"]),
    st.sampled_from([1, 8, 64]),
)
def test_the_collator_round_trips_and_takes_padded_rows(rows, side, multiple_of):
    def examples(batch):
        return [{name: batch[name][row] for name in batch} for row in range(len(rows))]

    batch = pad(rows, 7, multiple_of, side=side)
    assert documents(batch) == rows
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 7).all()
    assert batch["input_ids"].shape[1] == padded_length(max(map(len, rows)), multiple_of)
    cost = epoch_cost([list(range(len(rows)))], [len(row) for row in rows], multiple_of)
    assert cost.real + cost.padding == batch["input_ids"].numel()
    wide = pad(examples(batch), 7, length=64, side=side)
    assert wide["input_ids"].shape == (len(rows), 64)
    trimmed = pad(examples(wide), 7, multiple_of, side=side)
    assert all(torch.equal(trimmed[name], batch[name]) for name in batch)


def test_labels_of_tokens_follow_their_tokens():
    row = {"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1]}
    row["labels"] = [IGNORE, 2, IGNORE, 1]
    batch = pad([row, {"input_ids": [8], "labels": [0]}], 0, 1, max_length=2, truncate=True)
    assert batch["input_ids"].tolist() == [[5, 6], [8, 0]]
    assert batch["labels"].tolist() == [[2, IGNORE], [0, IGNORE]]


@prop
@given(st.lists(IDS, min_size=1, max_size=8), st.integers(1, 50))
def test_too_long_documents_are_refused_or_cut(rows, limit):
    for name in ("length", "max_length"):
        batch = pad(rows, 0, **{name: limit}, truncate=True)
        assert documents(batch) == [row[:limit] for row in rows]
        width = batch["input_ids"].shape[1]
        assert width == limit if name == "length" else width <= limit
        if max(map(len, rows)) > limit:
            with pytest.raises(ValueError, match=f"more than {limit}"):
                pad(rows, 0, **{name: limit})


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "no examples"),
        ([[1], []], "Example 1 is an empty document"),
        ([{"input_ids": [1, 2], "attention_mask": [0, 0]}], "Example 0 is an empty document"),
        ([{"input_ids": [1], "labels": 4}], "Example 0 has label 4: labels go from 0 to 3"),
        ([{"input_ids": [1], "label": -100}], "Example 0 has label -100"),
        ([{"input_ids": [1, 2], "labels": [0, 9]}], "Example 0 has label 9"),
        ([{"input_ids": [1, 2], "labels": [-1, 0]}], "Example 0 has label -1"),
        ([{"input_ids": [1, 2], "labels": [0]}], "one label per token"),
        ([{"input_ids": [[1, 2]]}], "one list of token ids"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "2 tokens and an attention_mask of 1"),
        ([{"input_ids": [1], "labels": 0}, [1]], "Some examples have no labels"),
        ([{"input_ids": [1], "token_type_ids": [0]}], "columns input_ids, token_type_ids"),
    ],
)
def test_bad_documents_are_refused_in_a_sentence(rows, message):
    with pytest.raises(ValueError, match=message):
        pad(rows, 0, classes=4)
    with pytest.raises(ValueError, match="side='top'"):
        pad([[1]], 0, side="top")
    with pytest.raises(TypeError, match="Example 0 has input_ids of torch.float32"):
        pad([[1.5]], 0)
    with pytest.raises(ValueError, match="are not negative"):
        pad([{"input_ids": [1], "labels": -1}], 0)

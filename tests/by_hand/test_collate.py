"""The collator: batches as the library makes them, and bad documents refused in a sentence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from by_hand.collate import IGNORE, pad
from by_hand.padding import epoch_cost
from helpers.batching import padded_length

ROWS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=40), min_size=1, max_size=8)


def by_the_library(kind, examples, side, multiple_of):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"[PAD]": 0})), pad_token="[PAD]", padding_side=side
    )
    return kind(tokenizer, pad_to_multiple_of=multiple_of)([dict(row) for row in examples])


def documents(batch):
    """The tokens of each example, without padding."""
    pairs = zip(batch["input_ids"], batch["attention_mask"])
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


@settings(deadline=None, max_examples=60)
@given(ROWS, st.sampled_from(["left", "right"]), st.sampled_from([1, 8]))
def test_batches_are_the_library_s_also_of_padded_rows(rows, side, multiple_of):
    examples = [{"input_ids": row, "labels": len(row) % 4} for row in rows]
    batch = pad(examples, 0, multiple_of, side=side, classes=4)
    theirs = by_the_library(DataCollatorWithPadding, examples, side, multiple_of)
    assert set(batch) == set(theirs) and documents(batch) == rows
    for name, values in batch.items():
        assert values.dtype == torch.int64 and torch.equal(values, theirs[name])
    cost = epoch_cost([list(range(len(rows)))], [len(row) for row in rows], multiple_of)
    assert cost.real + cost.padding == batch["input_ids"].numel()

    tagged = [{"input_ids": row, "labels": [token % 3 for token in row]} for row in rows]
    batch = pad(tagged, 0, multiple_of, side=side)
    theirs = by_the_library(DataCollatorForTokenClassification, tagged, side, multiple_of)
    assert torch.equal(batch["labels"], theirs["labels"])
    assert (batch["labels"] == IGNORE).equal(batch["attention_mask"] == 0)
    for length in (64, None):  # wider, and back to what it was
        padded = [{name: values[row] for name, values in batch.items()} for row in range(len(rows))]
        again = pad(padded, 0, multiple_of, length=length, side=side)
        wanted = length or padded_length(max(map(len, rows)), multiple_of)
        assert documents(again) == rows and again["input_ids"].shape[1] == wanted
        labels = again["labels"][again["attention_mask"].bool()]
        assert labels.tolist() == [token % 3 for row in rows for token in row]


@settings(deadline=None, max_examples=60)
@given(ROWS, st.integers(1, 50))
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
        ([[1], []], "Example 1 is an empty document"),
        ([{"input_ids": [1, 2], "attention_mask": [0, 0]}], "Example 0 is an empty document"),
        ([{"input_ids": [1], "labels": 4}], "Example 0 has label 4: labels go from 0 to 3"),
        ([{"input_ids": [1], "label": -100}], "Example 0 has label -100"),
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
    with pytest.raises(TypeError, match="Example 0 has input_ids of torch.float32"):
        pad([[1.5]], 0)

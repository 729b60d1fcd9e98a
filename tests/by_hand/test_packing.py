"""Packing: nothing lost, nothing over capacity, and DeBERTa computes what it does unpacked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from by_hand.collate import pad
from by_hand.packing import pack, packed_batch, packed_logits, packed_tokens
from helpers import models, train
from helpers.recipe import Recipe
from tight_fit.checks import IGNORE
from tight_fit.techniques.step import loss_sum

prop = settings(deadline=None, max_examples=60)
DOCUMENTS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=20), min_size=1, max_size=12)
DOCS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16, 17]]


def small(**fields):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 64, "position_buckets": 8,
        "relative_attention": True, "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
        "num_labels": 3, "pooler_hidden_size": 16, "initializer_range": 0.5,
        "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "pooler_dropout": 0,
    }  # fmt: skip
    return DebertaV2ForSequenceClassification(DebertaV2Config(**settings | fields)).eval()


MODEL = small()


@prop
@given(st.lists(st.integers(1, 40), min_size=1, max_size=80), st.integers(40, 90))
def test_packing_is_first_fit_decreasing(lengths, capacity):
    rows = pack(torch.tensor(lengths), capacity)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    naive = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in naive if sum(row) + length <= capacity]
        fitting[0].append(length) if fitting else naive.append([length])
    assert [[lengths[document] for document in row] for row in rows] == naive


@prop
@given(DOCUMENTS, st.integers(20, 50), st.sampled_from([1, 8]))
def test_a_packed_batch_holds_every_document_where_it_says(documents, capacity, multiple_of):
    packed = packed_batch(documents, 0, capacity, multiple_of)
    assert len(packed) == len(documents) and packed.labels is None
    assert packed.input_ids.shape[1] <= capacity
    assert int(packed.real.sum()) == sum(map(len, documents))
    expected = torch.zeros_like(packed.attention_mask)
    for document, (row, start) in zip(documents, packed.starts.tolist()):
        place = slice(start, start + len(document))
        assert packed.input_ids[row, place].tolist() == document
        assert packed.position_ids[row, place].tolist() == list(range(len(document)))
        assert not expected[row, place, place].any()
        expected[row, place, place] = True
    assert torch.equal(packed.attention_mask, expected)
    assert not packed.input_ids[~packed.real].any() and not packed.position_ids[~packed.real].any()


def results(model, logits, labels):
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits, labels).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters()}


def compare(model, documents, capacity):
    rows = [{"input_ids": ids, "labels": place % 3} for place, ids in enumerate(documents)]
    packed, padded = packed_batch(rows, 0, capacity), pad(rows, 0)
    ours = packed_logits(model, packed)
    theirs = model(padded["input_ids"], padded["attention_mask"]).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(packed.labels, padded["labels"])
    found = results(model, ours, packed.labels)
    for name, values in results(model, theirs, packed.labels).items():
        near = 1e-4 * float(values.abs().max()) + 1e-7
        torch.testing.assert_close(found[name], values, rtol=1e-3, atol=near, msg=name)
    return packed


@settings(deadline=None, max_examples=15)
@given(DOCUMENTS, st.integers(20, 100))
def test_logits_and_gradients_are_those_of_unpacked_documents(documents, capacity):
    """Also where a row is longer than the model's own 64 positions."""
    compare(MODEL, documents, capacity)


@pytest.mark.parametrize(
    "fields", [{"position_biased_input": True}, {"type_vocab_size": 2}, {"share_att_key": False}]
)
def test_so_it_is_in_other_forms_of_the_model_and_with_checkpointing(fields):
    model = small(**fields)
    assert compare(model, DOCS, 8).input_ids.shape == (2, 8)
    old = model.train().gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
    assert model.deberta.encoder.layer[0].gradient_checkpointing
    compare(model, DOCS, 8)


def test_the_mask_is_what_keeps_documents_apart():
    packed = packed_batch(DOCS, 0, 16)
    both = packed.real[:, :, None] & packed.real[:, None, :]
    mixed = type(packed)(packed.input_ids, both, packed.position_ids, packed.starts)
    assert (packed_logits(MODEL, mixed) - packed_logits(MODEL, packed)).abs().max() > 1e-2
    others = packed_batch([DOCS[0], *([id + 80 for id in ids] for ids in DOCS[1:])], 0, 16)
    assert torch.equal(packed_logits(MODEL, packed)[0], packed_logits(MODEL, others)[0])


def test_it_follows_autocast():
    packed, padded = packed_batch(DOCS, 0, 8), pad(DOCS, 0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = packed_logits(MODEL, packed)
        unpacked = MODEL(padded["input_ids"], padded["attention_mask"]).logits
    assert logits.dtype == torch.bfloat16 == unpacked.dtype
    exact = packed_logits(MODEL, packed)
    assert 0 < (logits - exact).abs().max() < 4 * (unpacked - exact).abs().max()
    logits.float().sum().backward()


def test_what_cannot_be_packed_is_refused():
    packed, no_labels = packed_batch(DOCS, 0, 8), [{"input_ids": [1, 2]}]
    one_label = [{"input_ids": [1, 2], "labels": 3}]
    per_token = [{"input_ids": [1, 2], "labels": [0, 1]}]
    for call, error, said in (
        (lambda: packed_logits(small(conv_kernel_size=3), packed), ValueError, "convolution"),
        (lambda: packed_logits(torch.nn.Linear(1, 1), packed), TypeError, "not Linear"),
        (lambda: packed_batch(DOCS, 0, 4), ValueError, "Example 0 of the batch has 5 tokens"),
        (lambda: packed_batch(per_token, 0, 4), ValueError, "token-level"),
        (lambda: packed_batch(one_label, 0, 4, classes=3), ValueError, "Example 0 has label 3"),
        (lambda: packed_tokens(one_label, 0, 8), ValueError, "one label per token"),
        (lambda: packed_tokens(no_labels, 0, 8), ValueError, "one label per token"),
    ):
        with pytest.raises(error, match=said):
            call()


# -- a decoder: one label per token, and documents kept apart by their positions


@pytest.fixture(scope="module")
def decoder():
    return models.build(Recipe("decoder", weights="random")).eval()


@pytest.fixture(scope="module")
def conversations():
    split = train.encoded(Recipe("decoder", weights="random", train_size=16, length=48))["train"]
    names = ("input_ids", "labels")
    return [
        {name: split.columns[name][example, :length] for name in names}
        for example, length in enumerate(split.lengths.tolist())
    ]


def test_packed_conversations_have_the_loss_and_gradient_of_single_ones(decoder, conversations):
    packed = packed_tokens(conversations, 0, 128)
    assert packed["input_ids"].shape[0] < len(conversations) / 2
    found = []
    single = [{name: row[None] for name, row in document.items()} for document in conversations]
    for batches in ([packed], single):
        decoder.zero_grad()
        loss = sum(loss_sum(decoder, batch, Recipe("decoder")) for batch in batches)
        loss.backward()
        gradient = torch.cat([value.grad.flatten() for value in decoder.parameters()])
        found.append((loss.item(), gradient))
    (one, first), (other, second) = found
    assert one == pytest.approx(other, rel=1e-5)
    assert (first - second).norm() / second.norm() < 1e-5


def test_nothing_leaks_from_one_document_to_the_next(decoder, conversations):
    """Other tokens in the first document change no logit of the second, unless keys are cached."""
    packed = packed_tokens(conversations[:2], 0, 128)
    inputs = {name: packed[name] for name in ("input_ids", "position_ids")}
    first = int((packed["position_ids"][0] == 0).nonzero()[1])
    other = dict(inputs, input_ids=inputs["input_ids"].clone())
    other["input_ids"][0, :first] = 77
    plain, changed = (decoder(**batch).logits[0] for batch in (inputs, other))
    assert torch.equal(plain[first:], changed[first:])
    assert not torch.allclose(plain[:first], changed[:first])
    leaking, changed = (decoder(**batch, use_cache=True).logits[0] for batch in (inputs, other))
    assert not torch.allclose(leaking[first:], changed[first:])


def test_every_label_is_kept_but_that_of_a_first_token(conversations):
    documents = [dict(document, labels=document["input_ids"]) for document in conversations]
    packed = packed_tokens(documents, 0, 96)
    counted = packed["labels"] != IGNORE
    assert counted.sum() == sum(len(document["input_ids"]) - 1 for document in documents)
    assert torch.equal(packed["labels"][counted], packed["input_ids"][counted])
    assert not counted[packed["position_ids"] == 0].any()

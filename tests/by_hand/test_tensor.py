"""A layer cut over ranks against the whole layer: outputs, gradients and bytes.

With any number of ranks, and uneven slices.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTLayer

from by_hand.exchange import Ring
from by_hand.tensor import (
    Attention,
    Layer,
    VocabParallelEmbedding,
    cut,
    f,
    g,
    gather,
    join,
    scatter,
    vocabulary_cross_entropy,
)
from by_hand.transport import threads
from tests.forked import forked

RANKS, WIDE = st.integers(1, 8), st.sampled_from([torch.float32, torch.float64])
NEAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}  # of the largest entry
PARTS = {  # a parameter of the layer by hand: that of transformers, and how it is cut
    **{
        f"attention.{ours}.{kind}": (f"attention.{theirs}.{kind}", 0)
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
        for kind in ("weight", "bias")
    },
    "attention.output.weight": ("attention.o_proj.weight", 1),
    "attention.output.bias": ("attention.o_proj.bias", None),
    "mlp.up.weight": ("mlp.fc1.weight", 0),
    "mlp.up.bias": ("mlp.fc1.bias", 0),
    "mlp.down.weight": ("mlp.fc2.weight", 1),
    "mlp.down.bias": ("mlp.fc2.bias", None),
    **{
        f"{place}.{kind}": (f"layernorm_{place}.{kind}", None)
        for place in ("before", "after")
        for kind in ("weight", "bias")
    },
}


def near(one, other):
    assert one.shape == other.shape and one.dtype == other.dtype
    scale = max(1.0, other.abs().max().item()) if other.numel() else 1
    return not one.numel() or (one - other).abs().max().item() <= NEAR[other.dtype] * scale


def numbers(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    RANKS, st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 12), st.integers(1, 11), st.booleans(),
    st.booleans(), WIDE,
)  # fmt: skip
def test_a_layer_with_and_without_slices_of_the_tokens_is_the_whole_layer(
    ranks, heads, middle, tokens, sequence, bias, dtype
):
    torch.manual_seed(2)
    sizes = {"hidden_size": 12, "num_attention_heads": heads, "intermediate_size": middle}
    dense = ViTLayer(ViTConfig(**sizes, qkv_bias=bias, attn_implementation="sdpa"))
    if not bias:
        dense.mlp.fc1.bias = dense.mlp.fc2.bias = None
    for norm in (dense.layernorm_before, dense.layernorm_after):
        nn.init.normal_(norm.weight)
    dense = dense.to(dtype)
    x = numbers(2, tokens, 12, dtype=dtype).requires_grad_()
    y = dense(x)
    weights = numbers(*y.shape, dtype=dtype, seed=7)  # each entry has one of its own in the loss
    (y * weights).sum().backward()

    def work(transport):
        exchange, mine = Ring(transport), x.detach().clone().requires_grad_()
        layer = Layer(dense, exchange, tokens=tokens if sequence else None)
        out = layer(cut(mine, exchange) if sequence else mine)
        out = join(out, exchange, tokens) if sequence else out
        (out * weights).sum().backward()
        return out.detach(), mine.grad, {name: p.grad for name, p in layer.named_parameters()}

    results, _ = threads(ranks, work)
    for out, grad, _ in results:
        assert near(out, y.detach()) and near(grad, x.grad)
        assert torch.equal(out, results[0][0]), "the same bits on every rank"
    theirs = dict(dense.named_parameters())
    expected = {name for name, (other, _) in PARTS.items() if other in theirs}
    assert results[0][2].keys() == expected and len(expected) == len(theirs)
    for name in expected:
        other, dim = PARTS[name]
        found = [gradients[name] for _, _, gradients in results]
        for one in found if dim is None else [torch.cat(found, dim)]:
            assert near(one, theirs[other].grad), name


@settings(max_examples=40, deadline=None)
@given(RANKS, st.integers(1, 30), st.integers(1, 5), st.booleans(), st.integers(0, 9))
def test_an_embedding_by_rows_of_the_vocabulary(ranks, words, hidden, padding, seed):
    torch.manual_seed(seed)
    dense = nn.Embedding(words, hidden, padding_idx=words // 2 if padding else None).double()
    nn.init.normal_(dense.weight)
    ids = torch.randint(0, words, (3, 4))
    y = dense(ids)
    y.square().sum().backward()

    def work(transport):
        module = VocabParallelEmbedding(dense, Ring(transport))
        out = module(ids)
        out.square().sum().backward()
        return out.detach(), module.weight.grad

    results, _ = threads(ranks, work)
    assert all(torch.equal(out, y) for out, _ in results)
    assert near(torch.cat([grad for _, grad in results]), dense.weight.grad)


@settings(max_examples=60, deadline=None)
@given(
    RANKS, st.integers(2, 40), WIDE | st.just(torch.bfloat16), st.integers(0, 5),
    st.sampled_from([1.0, 200.0]),
)  # fmt: skip
def test_cross_entropy_over_a_cut_vocabulary(ranks, words, dtype, ignored, scale):
    logits = (numbers(2, 3, words) * scale).to(dtype)
    labels = torch.randint(0, words, (2, 3), generator=torch.Generator().manual_seed(words))
    labels.view(-1)[:ignored] = -100
    whole, wide = logits.clone().requires_grad_(), torch.promote_types(dtype, torch.float32)
    loss = F.cross_entropy(whole.view(-1, words).to(wide), labels.view(-1))
    (2 * loss).backward()

    def work(transport):
        mine = logits.tensor_split(ranks, -1)[transport.rank].clone().requires_grad_()
        out = vocabulary_cross_entropy(mine, labels, words, Ring(transport))
        sent = transport.bytes_sent
        (2 * out).backward()
        return out.detach(), mine.grad, sent == transport.bytes_sent

    results, transports = threads(ranks, work)
    assert all(near(out, loss.detach()) and silent for out, _, silent in results)
    assert near(torch.cat([grad for _, grad, _ in results], -1), whole.grad)
    sent = sum(transport.bytes_sent for transport in transports)
    assert sent == 3 * 6 * wide.itemsize * 2 * (ranks - 1), "three numbers a label, in rings"


def test_cross_entropy_of_nothing_is_nan_as_torchs_and_what_is_wrong_is_refused():
    def loss(*labels, width=4):
        logits, labels = torch.zeros(len(labels), width), torch.tensor(labels)
        return threads(2, lambda one: vocabulary_cross_entropy(logits, labels, 8, Ring(one)))[0]

    assert all(out.isnan() for out in loss(-100, -100))
    for label in (8, -1):
        with pytest.raises(ValueError, match="labels go from 0 to 7, or are -100"):
            loss(0, label)
    with pytest.raises(ValueError, match="holds 4 of 8 words, and was given logits of 5"):
        loss(0, width=5)
    with pytest.raises(ValueError, match="A hidden size of 6 cannot be divided into 4 heads"):
        threads(1, lambda transport: Attention(*[nn.Linear(6, 6)] * 4, 4, Ring(transport)))


@settings(max_examples=30, deadline=None)
@given(RANKS, st.integers(1, 11), st.integers(0, 2))
def test_the_conjugates(ranks, length, dim):
    """What goes forward as a sum comes back as it is, and the other way round; slices likewise."""
    whole = numbers(*[2, 3, 4][:dim], length, *[2, 3, 4][dim + 1 :])
    slices = whole.tensor_split(ranks, dim)

    def work(transport):
        exchange, mine, ring = Ring(transport), slices[transport.rank], 0
        for call, x, y, grad, sends in (
            (lambda x: f(x, exchange), whole, whole, ranks * whole, "backward"),
            (lambda x: g(x, exchange), whole, ranks * whole, ranks * whole, "forward"),
            (lambda x: gather(x, exchange, length, dim), mine, whole, ranks * mine, "both"),
            (lambda x: join(x, exchange, length, dim), mine, whole, mine, "forward"),
            (lambda x: scatter(x, exchange, dim), whole, ranks * mine, ranks * whole, "both"),
            (lambda x: cut(x, exchange, dim), whole, mine, whole, "backward"),
        ):
            x, before = x.clone().requires_grad_(), transport.bytes_sent
            out = call(x)
            forward = transport.bytes_sent - before
            out.backward(out.detach())
            backward = transport.bytes_sent - before - forward
            assert near(out.detach(), y) and near(x.grad, grad)
            assert sends == "both" or (backward if sends == "forward" else forward) == 0
            ring += forward
        return ring

    # Forward: g is a ring, gather and scatter are its two halves, and join is a gather.
    once = 2 * (ranks - 1) * whole.numel() * 8
    assert sum(threads(ranks, work)[0]) == 2.5 * once


def test_masks_are_alike_on_whole_tokens_and_differ_on_slices():
    dense = ViTLayer(ViTConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8))

    def work(transport, tokens):
        layer = Layer(dense, Ring(transport), tokens=tokens, dropout=0.5, seed=3)
        return layer.apply_dropout(torch.ones(64))

    (one, other), _ = threads(2, lambda transport: work(transport, None))
    assert torch.equal(one, other) and 0 < (one == 0).sum() < 64
    (one, other), _ = threads(2, lambda transport: work(transport, 6))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_real_processes(ranks):
    """A ring over gloo and torch's collectives: a layer, an embedding and a loss like the whole."""
    for text in forked("tests/ranks/tensor.py", ranks=ranks):
        results = json.loads(text)
        assert results.pop("bytes") == results.pop("expected_bytes")
        assert max(results.values()) < 2e-5, results

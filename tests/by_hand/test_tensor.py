"""A layer cut over ranks against the whole layer: outputs, gradients and bytes.

With any number of ranks, and uneven slices.
"""

import json
from pathlib import Path

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
    MLP,
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

SCRIPT = Path(__file__).parents[1] / "ranks" / "tensor.py"
RANKS, DTYPES = st.integers(1, 8), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
NEAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}  # of the largest entry


def near(one, other):
    assert one.shape == other.shape and one.dtype == other.dtype
    scale = max(1e-6, other.abs().max().item()) if other.numel() else 1
    return not one.numel() or (one - other).abs().max().item() <= NEAR[other.dtype] * max(1, scale)


def numbers(*shape, dtype=torch.float64, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def both(ranks, dense, make, x, forward=lambda module, x, exchange: module(x)):
    """(whole: output, gradient of x, gradients by name), (ranks: the same), transports.

    The loss gives every entry a weight of its own.
    """
    whole = x.clone().requires_grad_()
    y = dense(whole)
    weights = numbers(*y.shape, dtype=y.dtype, seed=7)
    (y * weights).sum().backward()

    def work(transport):
        exchange = Ring(transport)
        module, mine = make(exchange), x.clone().requires_grad_()
        out = forward(module, mine, exchange)
        (out * weights).sum().backward()
        return out.detach(), mine.grad, {name: p.grad for name, p in module.named_parameters()}

    results, transports = threads(ranks, work)
    return (y.detach(), whole.grad), results, transports


def parts(results, name, dim):
    return torch.cat([gradients[name] for _, _, gradients in results], dim)


@settings(max_examples=40, deadline=None)
@given(
    ranks=RANKS,
    width=st.integers(1, 12),
    middle=st.integers(1, 20),
    dtype=DTYPES,
    bias=st.booleans(),
)
def test_an_mlp_by_columns_and_rows_is_the_whole_mlp(ranks, width, middle, dtype, bias):
    torch.manual_seed(0)
    up, down = (
        nn.Linear(width, middle, bias=bias, dtype=dtype),
        nn.Linear(middle, width, bias=bias, dtype=dtype),
    )
    dense = nn.Sequential(up, nn.GELU(), down)
    (y, dx), results, _ = both(
        ranks, dense, lambda exchange: MLP(up, down, exchange), numbers(2, 3, width, dtype=dtype)
    )
    for out, grad, gradients in results:
        assert near(out, y) and near(grad, dx)
        assert torch.equal(out, results[0][0]) and torch.equal(grad, results[0][1]), (
            "the same bits on every rank"
        )
        assert not bias or near(gradients["down.bias"], down.bias.grad)
    assert near(parts(results, "up.weight", 0), up.weight.grad)
    assert near(parts(results, "down.weight", 1), down.weight.grad)
    assert not bias or near(parts(results, "up.bias", 0), up.bias.grad)


@settings(max_examples=30, deadline=None)
@given(ranks=RANKS, heads=st.integers(1, 9), size=st.integers(1, 4), dtype=DTYPES)
def test_attention_by_heads_is_the_whole_attention(ranks, heads, size, dtype):
    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=heads * size,
        num_attention_heads=heads,
        intermediate_size=4,
        attn_implementation="sdpa",
    )
    dense = ViTLayer(config).attention.to(dtype)
    linears = dense.q_proj, dense.k_proj, dense.v_proj, dense.o_proj
    (y, dx), results, _ = both(
        ranks,
        lambda x: dense(x)[0],
        lambda exchange: Attention(*linears, heads, exchange),
        numbers(2, 5, heads * size, dtype=dtype),
    )
    assert all(near(out, y) and near(grad, dx) for out, grad, _ in results)
    for name, linear in zip(("query", "key", "value"), linears):
        assert near(parts(results, name + ".weight", 0), linear.weight.grad)
    assert near(parts(results, "output.weight", 1), linears[3].weight.grad)


@settings(max_examples=30, deadline=None)
@given(
    ranks=RANKS,
    tokens=st.integers(1, 11),
    sequence=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_layer_with_and_without_slices_of_the_tokens_is_the_whole_layer(
    ranks, tokens, sequence, dtype
):
    torch.manual_seed(2)
    dense = ViTLayer(
        ViTConfig(
            hidden_size=12, num_attention_heads=3, intermediate_size=10, attn_implementation="sdpa"
        )
    )
    dense = dense.to(dtype)
    for norm in (dense.layernorm_before, dense.layernorm_after):
        nn.init.normal_(norm.weight)
    own = tokens if sequence else None

    def forward(layer, x, exchange):
        return join(layer(cut(x, exchange)), exchange, tokens) if sequence else layer(x)

    (y, dx), results, _ = both(
        ranks,
        dense,
        lambda exchange: Layer(dense, exchange, tokens=own),
        numbers(2, tokens, 12, dtype=dtype),
        forward,
    )
    for out, grad, gradients in results:
        assert near(out, y) and near(grad, dx)
        for name, parameter in (
            ("before.weight", dense.layernorm_before.weight),
            ("after.bias", dense.layernorm_after.bias),
            ("mlp.down.bias", dense.mlp.fc2.bias),
            ("attention.output.bias", dense.attention.o_proj.bias),
        ):
            assert near(gradients[name], parameter.grad), name
    assert near(parts(results, "mlp.up.weight", 0), dense.mlp.fc1.weight.grad)


@settings(max_examples=40, deadline=None)
@given(
    ranks=RANKS,
    words=st.integers(1, 30),
    hidden=st.integers(1, 5),
    padding=st.booleans(),
    seed=st.integers(0, 9),
)
def test_an_embedding_by_rows_of_the_vocabulary(ranks, words, hidden, padding, seed):
    torch.manual_seed(seed)
    dense = nn.Embedding(words, hidden, padding_idx=words // 2 if padding else None).double()
    with torch.no_grad():
        dense.weight.normal_()
    ids = torch.randint(0, words, (3, 4))
    y = dense(ids)
    y.square().sum().backward()

    def work(transport):
        module = VocabParallelEmbedding(dense, Ring(transport))
        out = module(ids)
        out.square().sum().backward()
        return out.detach(), None, {"weight": module.weight.grad}

    results, _ = threads(ranks, work)
    assert all(torch.equal(out, y) for out, _, _ in results)
    assert near(parts(results, "weight", 0), dense.weight.grad)


@settings(max_examples=60, deadline=None)
@given(
    ranks=RANKS,
    words=st.integers(2, 40),
    dtype=DTYPES,
    ignored=st.integers(0, 5),
    scale=st.sampled_from([1.0, 200.0]),
)
def test_cross_entropy_over_a_cut_vocabulary(ranks, words, dtype, ignored, scale):
    logits = (numbers(2, 3, words) * scale).to(dtype)
    labels = torch.randint(0, words, (2, 3), generator=torch.Generator().manual_seed(words))
    labels.view(-1)[:ignored] = -100
    whole = logits.clone().requires_grad_()
    loss = F.cross_entropy(
        whole.view(-1, words).to(torch.promote_types(dtype, torch.float32)), labels.view(-1)
    )
    (2 * loss).backward()

    def work(transport):
        exchange = Ring(transport)
        mine = logits.tensor_split(ranks, -1)[transport.rank].clone().requires_grad_()
        out = vocabulary_cross_entropy(mine, labels, words, exchange)
        sent = transport.bytes_sent
        (2 * out).backward()
        return out.detach(), mine.grad, sent == transport.bytes_sent

    results, transports = threads(ranks, work)
    assert all(near(out, loss.detach()) and silent for out, _, silent in results)
    assert near(torch.cat([grad for _, grad, _ in results], -1), whole.grad)
    item = 8 if dtype == torch.float64 else 4
    assert sum(transport.bytes_sent for transport in transports) == 3 * 6 * item * 2 * (
        ranks - 1
    ), "three numbers a label, in rings"


def test_cross_entropy_of_nothing_is_nan_as_torchs_and_wrong_labels_are_refused():
    def loss(*labels, width=4):
        def work(transport):
            return vocabulary_cross_entropy(
                torch.zeros(len(labels), width), torch.tensor(labels), 8, Ring(transport)
            )

        return threads(2, work)[0]

    assert all(out.isnan() for out in loss(-100, -100))
    for label in (8, -1):
        with pytest.raises(ValueError, match="labels go from 0 to 7, or are -100"):
            loss(0, label)
    with pytest.raises(ValueError, match="holds 4 of 8 words, and was given logits of 5"):
        loss(0, width=5)
    with pytest.raises(ValueError, match="A hidden size of 6 cannot be divided into 4 heads"):
        threads(1, lambda transport: Attention(*[nn.Linear(6, 6)] * 4, 4, Ring(transport)))


@settings(max_examples=40, deadline=None)
@given(ranks=RANKS, length=st.integers(1, 11), dim=st.integers(0, 2))
def test_the_conjugates(ranks, length, dim):
    """What goes forward as a sum comes back as it is, and the other way round; slices likewise."""
    shape = [2, 3, 4]
    shape[dim] = length
    whole = numbers(*shape)
    slices = whole.tensor_split(ranks, dim)

    def work(transport):
        exchange, out = Ring(transport), {}
        for name, x, call in (
            ("f", whole, lambda x: f(x, exchange)),
            ("g", whole, lambda x: g(x, exchange)),
            ("gather", slices[transport.rank], lambda x: gather(x, exchange, length, dim)),
            ("join", slices[transport.rank], lambda x: join(x, exchange, length, dim)),
            ("scatter", whole, lambda x: scatter(x, exchange, dim)),
            ("cut", whole, lambda x: cut(x, exchange, dim)),
        ):
            x = x.clone().requires_grad_()
            before = transport.bytes_sent
            y = call(x)
            middle = transport.bytes_sent
            y.backward(y.detach())
            out[name] = y.detach(), x.grad, middle - before, transport.bytes_sent - middle
        return out

    results, _ = threads(ranks, work)
    ring = 0
    for rank, out in enumerate(results):
        mine = slices[rank]
        for name, y, grad in (
            ("f", whole, ranks * whole),
            ("g", ranks * whole, ranks * whole),
            ("gather", whole, ranks * mine),
            ("join", whole, mine),
            ("scatter", ranks * mine, ranks * whole),
            ("cut", mine, whole),
        ):
            assert near(out[name][0], y) and near(out[name][1], grad), name
        assert out["f"][2] == out["g"][3] == out["cut"][2] == out["join"][3] == 0
        ring += out["g"][2]
    assert ring == sum(out["scatter"][2] + out["gather"][2] for out in results), (
        "an all-reduce is the two halves"
    )
    assert ring == 2 * (ranks - 1) * whole.numel() * 8


def test_masks_are_alike_on_whole_tokens_and_differ_on_slices():
    dense = ViTLayer(ViTConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8))
    x = numbers(2, 6, 8, dtype=torch.float32)

    def work(transport, tokens):
        exchange = Ring(transport)
        layer = Layer(dense, exchange, tokens=tokens, dropout=0.5, seed=3)
        y = layer(cut(x, exchange) if tokens else x)
        ones = layer.apply_dropout(torch.ones(64))
        return y.detach(), ones

    (one, other), _ = threads(2, lambda transport: work(transport, None))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert 0 < (one[1] == 0).sum() < 64
    (one, other), _ = threads(2, lambda transport: work(transport, 6))
    assert not torch.equal(one[1], other[1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_real_processes(ranks):
    """A ring over gloo and torch's collectives: a layer, an embedding and a loss like the whole."""
    for text in forked(SCRIPT, ranks=ranks):
        results = json.loads(text)
        assert results.pop("bytes") == results.pop("expected_bytes")
        assert max(results.values()) < 2e-5, results

"""Collectives by hand against plain sums: any number of ranks, length, dtype.

On real processes, beside torch's own, a tensor-parallel layer runs on them (test_tensor.py).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from by_hand.collectives import (
    chunks,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    server_all_reduce,
)
from by_hand.transport import threads

DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 99))
def test_sums_and_bytes_are_what_they_should_be_on_every_rank(ranks, length, dtype, seed):
    """Small whole numbers, whose sums are exact in every dtype and order. The ring sends 2 (N-1)/N
    of the tensor per rank, exactly where N divides its length; else within one element per step."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(-8, 9, (length,), generator=generator).to(dtype) for _ in range(ranks)]
    total, before = torch.stack(tensors).sum(0).to(dtype), [one.clone() for one in tensors]
    size = length * dtype.itemsize

    results, ring = threads(ranks, lambda one: ring_all_reduce(one, tensors[one.rank]))
    assert all(torch.equal(one, total) and one.dtype == dtype for one in results)
    for one in ring:
        assert len(one.sent) == 2 * (ranks - 1)
        assert abs(one.bytes_sent - 2 * (ranks - 1) / ranks * size) <= 2 * dtype.itemsize
    assert sum(one.bytes_sent for one in ring) == 2 * (ranks - 1) * size

    results, star = threads(ranks, lambda one: server_all_reduce(one, tensors[one.rank]))
    assert all(torch.equal(one, total) for one in results)
    assert star[0].bytes_sent == (ranks - 1) * size == sum(one.bytes_sent for one in star[1:])

    mine, pieces = [(rank + 1) % ranks for rank in range(ranks)], chunks(total, ranks)
    halves, _ = threads(ranks, lambda one: ring_reduce_scatter(one, tensors[one.rank]))
    assert all(torch.equal(half[own], pieces[own]) for half, own in zip(halves, mine))

    def gather(one):
        own = mine[one.rank]
        others = [torch.full_like(piece, -99) for piece in pieces]
        return ring_all_gather(one, [*others[:own], pieces[own], *others[own + 1 :]])

    results, _ = threads(ranks, gather)
    assert all(torch.equal(torch.cat(one), total) for one in results)
    assert all(torch.equal(*both) for both in zip(tensors, before)), "inputs stay"


def test_wrong_partners_and_shapes_and_lost_messages_are_refused(monkeypatch):
    monkeypatch.setattr("by_hand.transport.PATIENCE", 0.1)

    def on_rank_0(call):
        return lambda transport: call(transport) if transport.rank == 0 else None

    def crossed(transport):
        transport.send(torch.zeros(2), 1 - transport.rank)
        transport.receive(torch.zeros(3), 1 - transport.rank)

    for ranks, work, error, message in (
        (2, lambda one: one.send(torch.zeros(1), 2), ValueError, "Rank [01] of 2 cannot exchange"),
        (2, on_rank_0(lambda one: one.send(torch.zeros(1), 0)), ValueError, "with rank 0"),
        (2, crossed, ValueError, "expected .3,. .* received .2,."),
        (0, crossed, ValueError, "at least 1"),
        (2, on_rank_0(lambda one: one.receive(torch.zeros(1), 1)), TimeoutError, "waited 0.1 sec"),
    ):
        with pytest.raises(error, match=message):
            threads(ranks, work)

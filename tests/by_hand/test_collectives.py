"""Collectives by hand against torch's own and plain sums: any number of ranks, length, dtype."""

import json
from pathlib import Path

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
from tests.forked import forked

RANKS, LENGTH = st.integers(1, 8), st.integers(0, 40)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float16])


def data(ranks: int, length: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Small whole numbers: their sums are exact in every dtype, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, (length,), generator=generator).to(dtype) for _ in range(ranks)]


@settings(max_examples=60, deadline=None)
@given(ranks=RANKS, length=LENGTH, dtype=DTYPES, seed=st.integers(0, 99))
def test_sums_are_right_on_every_rank(ranks, length, dtype, seed):
    tensors = data(ranks, length, dtype, seed)
    expected = torch.stack(tensors).sum(0).to(dtype)
    for reduce in (ring_all_reduce, server_all_reduce):

        def work(transport, reduce=reduce):
            return reduce(transport, tensors[transport.rank])

        results, _ = threads(ranks, work)
        assert all(torch.equal(result, expected) and result.dtype == dtype for result in results)
    assert all(
        torch.equal(one, other) for one, other in zip(tensors, data(ranks, length, dtype, seed))
    ), "inputs stay"


@settings(max_examples=40, deadline=None)
@given(ranks=RANKS, rows=st.integers(0, 5), columns=st.integers(1, 7))
def test_real_numbers_are_the_same_bits_on_every_rank_and_near_the_sum(ranks, rows, columns):
    tensors = [
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(rank))
        for rank in range(ranks)
    ]
    results, _ = threads(
        ranks, lambda transport: ring_all_reduce(transport, tensors[transport.rank])
    )
    assert all(
        torch.equal(result, results[0]) and result.shape == (rows, columns) for result in results
    )
    assert torch.allclose(results[0].double(), torch.stack(tensors).double().sum(0), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(ranks=RANKS, length=LENGTH)
def test_the_ring_sends_what_the_formula_says(ranks, length):
    """2 (N-1)/N of the tensor per rank, exactly where N divides its length; else within one
    element per step."""
    tensors = data(ranks, length, torch.float32)
    _, transports = threads(
        ranks, lambda transport: ring_all_reduce(transport, tensors[transport.rank])
    )
    for transport in transports:
        assert len(transport.sent) == 2 * (ranks - 1)
        assert abs(transport.bytes_sent - 2 * (ranks - 1) / ranks * 4 * length) <= 4 * 2
    assert sum(transport.bytes_sent for transport in transports) == 2 * (ranks - 1) * 4 * length, (
        "over all ranks the odd ones even out"
    )
    _, transports = threads(
        ranks, lambda transport: server_all_reduce(transport, tensors[transport.rank])
    )
    assert (
        transports[0].bytes_sent
        == 4 * length * (ranks - 1)
        == sum(transport.bytes_sent for transport in transports[1:])
    )


@settings(max_examples=40, deadline=None)
@given(ranks=RANKS, length=LENGTH)
def test_the_halves_of_the_ring(ranks, length):
    tensors = data(ranks, length, torch.int64)
    total = chunks(torch.stack(tensors).sum(0), ranks)
    scattered, _ = threads(
        ranks, lambda transport: ring_reduce_scatter(transport, tensors[transport.rank])
    )
    mine = [(rank + 1) % ranks for rank in range(ranks)]
    assert all(
        torch.equal(pieces[number], total[number]) for pieces, number in zip(scattered, mine)
    )
    gathered, _ = threads(
        ranks,
        lambda transport: ring_all_gather(
            transport,
            [
                piece if number == mine[transport.rank] else torch.full_like(piece, -99)
                for number, piece in enumerate(total)
            ],
        ),
    )
    assert all(
        torch.equal(piece, right) for pieces in gathered for piece, right in zip(pieces, total)
    )


def test_wrong_partners_and_shapes_are_refused():
    with pytest.raises(ValueError, match="Rank [01] of 2 cannot exchange messages with rank 2"):
        threads(2, lambda transport: transport.send(torch.zeros(1), 2))
    with pytest.raises(ValueError, match="expected .3,. .* received .2,."):
        threads(
            2,
            lambda transport: (
                transport.send(torch.zeros(2), 1)
                if transport.rank == 0
                else transport.receive(torch.zeros(3), 0)
            ),
        )
    with pytest.raises(ValueError, match="at least 1"):
        threads(0, lambda transport: None)


def test_a_message_that_never_comes_is_given_up(monkeypatch):
    monkeypatch.setattr("by_hand.transport.PATIENCE", 0.1)
    with pytest.raises(TimeoutError, match="Rank 0 waited 0.1 seconds for a message from rank 1"):
        threads(
            2,
            lambda transport: transport.receive(torch.zeros(1), 1) if transport.rank == 0 else None,
        )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_real_processes_it_is_torchs_own_all_reduce(ranks):
    """gloo may add in another order: equal within rounding, and bit for bit alike on all ranks."""
    texts = forked(Path(__file__).parents[1] / "ranks" / "ring.py", ranks=ranks)
    results = [json.loads(text) for text in texts]
    assert all(
        result["near"] and result["bytes"] == results[0]["expected_bytes"] for result in results
    )
    assert len({result["digest"] for result in results}) == 1

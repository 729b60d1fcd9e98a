"""ZeRO by hand: the weights of the unsharded run, and the bytes of the formulas.

Those of torch's own, on real ranks, are in tests/layouts.
"""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from by_hand.transport import threads
from by_hand.zero import Zero, sent_bytes, states_bytes


def model(width: int, dtype: torch.dtype) -> list[nn.Module]:
    """Three units: an embedding, a layer, a head; their sizes are seldom divided by the ranks."""
    torch.manual_seed(width)
    units = [
        nn.Embedding(7, width),
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        nn.Linear(width, 3),
    ]
    return [unit.to(dtype) for unit in units]


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def steps_of(ranks: int, steps: int, micro: int, seed: int):
    """[step][rank][micro-batch] of (tokens, labels), a row here and two there."""
    generator = torch.Generator().manual_seed(seed)

    def part(rank):
        return tuple(torch.randint(most, (1 + rank % 2,), generator=generator) for most in (7, 3))

    return [[[part(rank) for _ in range(micro)] for rank in range(ranks)] for _ in range(steps)]


def mean_over(examples: int):
    def loss(logits, labels):
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / examples

    return loss


def alone(units: list[nn.Module], steps) -> torch.Tensor:
    """One process, one batch per step: the examples of all ranks together."""
    whole = nn.Sequential(*units)
    optimizer = adam(whole.parameters())
    for step in steps:
        batches = [batch for rank in step for batch in rank]
        tokens, labels = map(torch.cat, zip(*batches))
        mean_over(len(labels))(whole(tokens), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(whole.parameters()).detach()


def sharded(units, steps, stage, ranks):
    """(weights, Zero, bytes sent in training) of each rank."""

    def work(transport):
        zero = Zero(transport, copy.deepcopy(units), stage, adam)
        for step in steps:
            examples = sum(len(labels) for rank in step for _, labels in rank)
            zero.step(step[transport.rank], mean_over(examples))
        sent = transport.bytes_sent
        return zero.weights(), zero, sent

    return threads(ranks, work)[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8), st.sampled_from([0, 1, 2, 3]), st.integers(1, 6), st.integers(1, 3),
    st.sampled_from([torch.float64, torch.float32]), st.integers(0, 99),
)  # fmt: skip
def test_the_weights_are_those_of_the_unsharded_run_and_bytes_follow_the_formulas(
    ranks, stage, width, micro, dtype, seed
):
    """fp64 within 1e-9; fp32 within 1e-3, as Adam makes a step of a tiny gradient's rounding.
    Bytes within the odd number of each unit; over all ranks together exactly."""
    units, steps, itemsize = model(width, dtype), steps_of(ranks, 3, micro, seed), dtype.itemsize
    before = nn.utils.parameters_to_vector(nn.Sequential(*units).parameters())
    truth = alone(copy.deepcopy(units), steps)
    trained = sharded(units, steps, stage, ranks)
    for weights, _, _ in trained:
        assert torch.equal(weights, trained[0][0]) and weights.dtype == dtype, "one model"
    assert (trained[0][0] - truth).abs().max() < (1e-9 if dtype == torch.float64 else 1e-3)
    assert (truth - before).abs().max() > 1e-2, "it has trained"

    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units]
    formula = states_bytes(sum(sizes), ranks, stage, itemsize)
    odd = itemsize * len(units)
    for _, zero, _ in trained:
        held = zero.held()
        last = [one for one in zero.moments if one.event in ("reduce", "drop")][-1]
        assert abs(last.gradients - formula["gradients"]) <= odd
        assert held["gradients"] == 0, "after the update they are gone"
        assert abs(held["parameters"] - formula["parameters"]) <= odd
        assert abs(held["optimizer states"] - formula["optimizer states"]) <= 2 * odd
        most = max(moment.parameters for moment in zero.moments)
        largest = max(sizes) * itemsize if stage == 3 else 0
        assert most == held["parameters"] + largest, "the largest unit whole, no more"
    for kind in ("parameters", "optimizer states"):
        total = sum(zero.held()[kind] for _, zero, _ in trained)
        assert total == pytest.approx(formula[kind] * ranks)

    sent = [one for _, _, one in trained]
    each = len(steps) * sent_bytes(sum(sizes), ranks, stage, micro, itemsize)
    assert sum(sent) == round(ranks * each)
    assert all(abs(one - each) <= odd * 3 * micro * len(steps) for one in sent)
    if micro == 1:  # twice, twice, twice and three times the parameters
        times = {0: 2, 1: 2, 2: 2, 3: 3}[stage] * len(steps)
        assert each == pytest.approx(times * itemsize * sum(sizes) * (ranks - 1) / ranks)


def test_stage_3_gathers_each_layer_twice_and_drops_it():
    zero = sharded(model(4, torch.float32), steps_of(2, 1, 1, 0), 3, 2)[0][1]
    events = [(moment.event, moment.unit) for moment in zero.moments]
    forward = [(event, unit) for unit in (0, 1, 2) for event in ("gather", "forward", "drop")]
    backward = [
        (event, unit) for unit in (2, 1, 0) for event in ("gather", "backward", "reduce", "drop")
    ]
    assert events == [*forward, *backward, ("update", None)]
    rest = zero.held()["parameters"]
    assert all(
        (moment.parameters > rest) == (moment.event not in ("drop", "update"))
        for moment in zero.moments
    )


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="stage=4 is not known"):
        threads(1, lambda transport: Zero(transport, model(2, torch.float32), 4))
    with pytest.raises(ValueError, match="join a layer without any"):
        threads(1, lambda transport: Zero(transport, [nn.Linear(2, 2), nn.GELU()], 3))

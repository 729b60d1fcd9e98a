"""Samplers: every example once over all ranks in equally many steps, resumable, within budget."""

import json
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from by_hand.collate import Collator
from by_hand.padding import padded_share
from by_hand.samplers import BucketBatchSampler, TokenBudgetBatchSampler
from helpers.batching import bucketed, padded_length

prop = settings(deadline=None, max_examples=60)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=120)
SEEDS = st.integers(0, 2**32 - 1)
MICRO, WINDOW, EPOCH = st.integers(1, 6), st.integers(1, 5), st.integers(0, 50)


def flat(batches):
    return [row for batch in batches for row in batch]


@st.composite
def samplers(draw):
    """(function that makes the sampler of a rank, lengths, drop_last, number of ranks)."""
    lengths, seed, drop, many = (
        draw(one) for one in (LENGTHS, SEEDS, st.booleans(), st.integers(1, 4))
    )
    window, budget, size = draw(WINDOW), draw(st.booleans()), draw(MICRO)
    assume(len(lengths) >= many)
    if not budget:
        assume(len(lengths) >= size * many if drop else size > 1 or len(lengths) % many == 0)
    kind = TokenBudgetBatchSampler if budget else BucketBatchSampler
    most = draw(st.integers(64, 300)) if budget else size

    def make(rank=0):
        return kind(lengths, most, window, seed, drop, rank, many)

    return make, lengths, drop, many


def all_ranks(make, ranks, epoch):
    found = [make(rank) for rank in range(ranks)]
    for sampler in found:
        sampler.set_epoch(epoch)
    try:
        return [list(sampler) for sampler in found]
    except ValueError as error:  # rows that fill the budget one by one
        assert "one by one" in str(error) and len(found[0].lengths) % ranks
        assume(False)


@prop
@given(samplers(), EPOCH)
def test_over_all_ranks_every_example_comes_once_in_equally_many_steps(case, epoch):
    make, lengths, drop, ranks = case
    epochs = all_ranks(make, ranks, epoch)
    sampler = make()
    sampler.set_epoch(epoch)
    assert {len(batches) for batches in epochs} == {len(sampler)} and len(sampler) > 0
    assert all(batch for batches in epochs for batch in batches)
    rows = flat(flat(epochs))
    assert len(rows) == len(set(rows)) and set(rows) <= set(range(len(lengths)))
    if not drop:
        assert len(rows) == len(lengths)
    elif isinstance(sampler, BucketBatchSampler):
        assert len(lengths) - len(rows) == len(lengths) % (sampler.batch_size * ranks)
    if isinstance(sampler, BucketBatchSampler):
        size = sampler.batch_size
        for step in zip(*epochs):
            sizes = [len(batch) for batch in step]
            assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
        full = len(lengths) // (size * ranks) - 1
        assert all(len(batch) == size for batches in epochs for batch in batches[:full])
    else:
        for batch in flat(epochs):
            longest = max(lengths[row] for row in batch)
            assert len(batch) * padded_length(longest) <= sampler.tokens
    for batches in epochs:
        fixed = padded_share(batches, lengths, length=padded_length(max(lengths)))
        assert padded_share(batches, lengths) <= fixed


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_the_last_steps_are_balanced_whatever_remains(ranks, size):
    whole = ranks * size
    for rows in range(ranks, 4 * whole):
        make = partial(BucketBatchSampler, [5] * rows, size, ranks=ranks)
        epochs = zip(*(make(rank=rank).batches() for rank in range(ranks)), strict=True)
        steps = [[len(batch) for batch in step] for step in epochs]
        assert len(steps) == -(-rows // whole) and sum(map(sum, steps)) == rows
        for step in steps:
            assert 0 < min(step) and max(step) <= size and max(step) - min(step) <= 1
        if 0 < rows % whole < ranks and rows > whole:  # too few for a step of their own
            assert abs(sum(steps[-1]) - sum(steps[-2])) <= 1, "the last two are halved"


def test_a_budget_s_last_batches_are_dropped_or_halved_for_the_ranks():
    lengths, settings = [8] * 10, {"tokens": 16, "ranks": 2}  # 5 batches of 2
    dropped = [
        TokenBudgetBatchSampler(lengths, rank=rank, drop_last=True, **settings).batches()
        for rank in (0, 1)
    ]
    assert [[len(batch) for batch in batches] for batches in dropped] == [[2, 2], [2, 2]]
    halved = [TokenBudgetBatchSampler(lengths, rank=rank, **settings).batches() for rank in (0, 1)]
    assert sorted(len(batch) for batches in halved for batch in batches) == [1, 1, 2, 2, 2, 2]


@prop
@given(LENGTHS, st.integers(1, 6), WINDOW, SEEDS, EPOCH)
def test_one_rank_s_sampler_is_the_bucketed_order(lengths, size, window, seed, epoch):
    sampler = BucketBatchSampler(lengths, size, window, seed)
    sampler.set_epoch(epoch)
    assert list(sampler) == flat(bucketed(lengths, size, size, window, seed, epoch))


@prop
@given(st.integers(2, 4), st.integers(2, 5), SEEDS)
def test_the_ranks_of_a_step_meet_examples_of_similar_length(ranks, size, seed):
    lengths = list(range(1, 16 * ranks * size + 1))
    epochs = [
        BucketBatchSampler(lengths, size, 16, seed, rank=rank, ranks=ranks).batches()
        for rank in range(ranks)
    ]
    for step in zip(*epochs):
        longest = [max(lengths[row] for row in batch) for batch in step]
        assert max(longest) - min(longest) == ranks - 1


@prop
@given(samplers(), EPOCH, st.data())
def test_a_run_resumes_in_the_middle_of_an_epoch_with_the_rest_exactly(case, epoch, data):
    make, _, _, ranks = case
    whole = all_ranks(make, ranks, epoch)[0]
    sampler = make()
    sampler.set_epoch(epoch)
    batches, done = iter(sampler), data.draw(st.integers(0, len(whole)))
    assert [next(batches) for _ in range(done)] == whole[:done]
    state = json.loads(json.dumps(sampler.state_dict()))
    assert (state["epoch"], state["done"]) == (epoch, done)
    for rank in range(ranks):  # one rank's state is every rank's
        resumed = make(rank)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        resumed.set_epoch(epoch)  # a loop over epochs says so again
        assert len(resumed) == len(whole)
        assert list(resumed) == make_epoch(make(rank), epoch)[done:]
        assert list(resumed) == make_epoch(
            make(rank), epoch
        )  # the next time it is a whole epoch again
    assert list(batches) == whole[done:]
    sampler.set_epoch(epoch + 1)
    assert sampler.state_dict()["done"] == 0


def make_epoch(sampler, epoch):
    sampler.set_epoch(epoch)
    return sampler.batches()


def test_a_state_of_another_order_or_beyond_the_epoch_is_refused():
    sampler = BucketBatchSampler([3, 1, 2, 5], 2)
    state = sampler.state_dict()
    for other in (
        BucketBatchSampler([3, 1, 2], 2),
        BucketBatchSampler([3, 1, 2, 6], 2),
        BucketBatchSampler([3, 1, 2, 5], 1),
        BucketBatchSampler([3, 1, 2, 5], 2, seed=1),
        TokenBudgetBatchSampler([3, 1, 2, 5], 16),
    ):
        with pytest.raises(ValueError, match="resume with the same data and settings"):
            other.load_state_dict(state)
    for wrong in ({"done": 3}, {"done": -1}, {"epoch": -1}, {"epoch": 5, "done": 3}):
        with pytest.raises(ValueError):
            sampler.load_state_dict({**state, **wrong})
    assert sampler.state_dict() == state
    with pytest.raises(TypeError, match="done=None"):
        sampler.load_state_dict({name: value for name, value in state.items() if name != "done"})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BucketBatchSampler([2, 3], 3, drop_last=True), "2 examples make no full step"),
        (lambda: BucketBatchSampler([2, 3], 1, rank=2, ranks=2), "rank=2 does not exist"),
        (lambda: BucketBatchSampler([2, 3], 4, ranks=3), "2 examples are too few for 3 ranks"),
        (lambda: BucketBatchSampler([2, 3, 4], 1, ranks=2), "use batch_size=2 or more"),
        (lambda: BucketBatchSampler([2, 0], 1), "Example 1 has length 0"),
        (lambda: BucketBatchSampler([2, -4], 1), "Example 1 has length -4"),
        (lambda: BucketBatchSampler([], 1), "no examples"),
        (lambda: BucketBatchSampler([2], 0), "batch_size=0 must be at least 1"),
        (lambda: BucketBatchSampler([2], 1, seed=2**32), "seed=4294967296 must be at most"),
        (lambda: BucketBatchSampler([2], 1).set_epoch(-1), "epoch=-1"),
        (
            lambda: TokenBudgetBatchSampler([9, 17], 16),
            "Example 1 takes 24 padded tokens, more than the budget of 16",
        ),
        (lambda: TokenBudgetBatchSampler([8, 8, 8], 8, ranks=2).batches(), "one by one"),
    ],
)
def test_bad_numbers_are_refused_in_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_data_loader_takes_sampler_and_collator_and_resumes():
    documents = [
        {"input_ids": list(range(1, 2 + 7 * row % 23)), "labels": row % 3} for row in range(30)
    ]
    lengths = [len(row["input_ids"]) for row in documents]
    collator = pickle.loads(pickle.dumps(Collator(0, classes=3)))
    sampler = BucketBatchSampler(np.array(lengths), 4, window=2)
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=collator)
    whole = list(loader)
    assert sum(int(batch["attention_mask"].sum()) for batch in whole) == sum(lengths)
    batches = iter(loader)
    next(batches), next(batches)
    again = BucketBatchSampler(lengths, 4, window=2)
    again.load_state_dict(sampler.state_dict())
    rest = list(DataLoader(documents, batch_sampler=again, collate_fn=collator))
    assert len(rest) == len(whole) - 2
    assert all(torch.equal(a[name], b[name]) for a, b in zip(rest, whole[2:]) for name in a)

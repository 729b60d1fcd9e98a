"""Samplers: every example once over all ranks in equally many steps, resumable, within budget."""

import json
import pickle

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
SEEDS, FEW, EPOCH = st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 50)


def flat(batches):
    return [row for batch in batches for row in batch]


def at(sampler, epoch):
    sampler.set_epoch(epoch)
    return sampler


@st.composite
def samplers(draw):
    """(function that makes the sampler of a rank, lengths, drop_last, number of ranks)."""
    lengths, seed, drop, ranks = draw(LENGTHS), draw(SEEDS), draw(st.booleans()), draw(FEW)
    window, budget, size = draw(FEW), draw(st.booleans()), draw(st.integers(1, 6))
    assume(len(lengths) >= ranks)
    if not budget:
        assume(len(lengths) >= size * ranks if drop else size > 1 or len(lengths) % ranks == 0)
    kind = TokenBudgetBatchSampler if budget else BucketBatchSampler
    most = draw(st.integers(64, 300)) if budget else size
    return lambda rank=0: kind(lengths, most, window, seed, drop, rank, ranks), lengths, drop, ranks


def all_ranks(make, ranks, epoch):
    try:
        return [list(at(make(rank), epoch)) for rank in range(ranks)]
    except ValueError as error:  # rows that fill the budget one by one
        assert "one by one" in str(error) and len(make().lengths) % ranks
        assume(False)


@prop
@given(samplers(), EPOCH)
def test_over_all_ranks_every_example_comes_once_in_equally_many_steps(case, epoch):
    make, lengths, drop, ranks = case
    epochs, sampler = all_ranks(make, ranks, epoch), at(make(), epoch)
    assert {len(batches) for batches in epochs} == {len(sampler)} and len(sampler) > 0
    assert all(batch for batches in epochs for batch in batches)
    rows = flat(flat(epochs))
    assert len(rows) == len(set(rows)) and set(rows) <= set(range(len(lengths)))
    assert drop or len(rows) == len(lengths)
    if isinstance(sampler, BucketBatchSampler):
        size = sampler.batch_size
        assert not drop or len(lengths) - len(rows) == len(lengths) % (size * ranks)
        for step in zip(*epochs):
            sizes = [len(batch) for batch in step]
            assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
        full, left = divmod(len(lengths), size * ranks)
        assert all(len(batch) == size for batches in epochs for batch in batches[: full - 1])
        assert len(sampler) == full + (left > 0 and not drop)
        if not drop and full and 0 < left < ranks:  # too few for a step of their own
            last, other = (sum(len(batches[at]) for batches in epochs) for at in (-1, -2))
            assert abs(last - other) <= 1, "the last two are halved"
    else:
        for batch in flat(epochs):
            longest = max(lengths[row] for row in batch)
            assert len(batch) * padded_length(longest) <= sampler.tokens
    for batches in epochs:
        fixed = padded_share(batches, lengths, length=padded_length(max(lengths)))
        assert padded_share(batches, lengths) <= fixed


def test_a_budget_s_last_batches_are_dropped_or_halved_for_the_ranks():
    for drop, sizes in ((True, [2, 2, 2, 2]), (False, [1, 1, 2, 2, 2, 2])):  # of 5 batches of 2
        made = [
            TokenBudgetBatchSampler([8] * 10, 16, drop_last=drop, rank=rank, ranks=2).batches()
            for rank in (0, 1)
        ]
        assert sorted(map(len, flat(made))) == sizes


@prop
@given(LENGTHS, st.integers(1, 6), FEW, SEEDS, EPOCH)
def test_one_rank_s_sampler_is_the_bucketed_order(lengths, size, window, seed, epoch):
    sampler = at(BucketBatchSampler(lengths, size, window, seed), epoch)
    assert list(sampler) == flat(bucketed(lengths, size, size, window, seed, epoch))


def test_the_ranks_of_a_step_meet_examples_of_similar_length():
    lengths = list(range(1, 16 * 3 * 4 + 1))
    epochs = [BucketBatchSampler(lengths, 4, 16, rank=rank, ranks=3).batches() for rank in range(3)]
    for step in zip(*epochs):
        longest = [max(lengths[row] for row in batch) for batch in step]
        assert max(longest) - min(longest) == 2


@prop
@given(samplers(), EPOCH, st.data())
def test_a_run_resumes_in_the_middle_of_an_epoch_with_the_rest_exactly(case, epoch, data):
    make, _, _, ranks = case
    whole, sampler = all_ranks(make, ranks, epoch)[0], at(make(), epoch)
    batches, done = iter(sampler), data.draw(st.integers(0, len(whole)))
    assert [next(batches) for _ in range(done)] == whole[:done]
    state = json.loads(json.dumps(sampler.state_dict()))
    assert (state["epoch"], state["done"]) == (epoch, done)
    for rank in range(ranks):  # one rank's state is every rank's
        resumed, own = make(rank), at(make(rank), epoch).batches()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        resumed.set_epoch(epoch)  # a loop over epochs says so again
        assert len(resumed) == len(whole)
        assert list(resumed) == own[done:]
        assert list(resumed) == own, "the next time it is a whole epoch again"
    assert list(batches) == whole[done:]
    assert at(sampler, epoch + 1).state_dict()["done"] == 0


def test_a_state_of_another_order_or_beyond_the_epoch_is_refused():
    sampler = BucketBatchSampler([3, 1, 2, 5], 2)
    state = sampler.state_dict()
    for other in (
        BucketBatchSampler([3, 1, 2], 2),
        BucketBatchSampler([3, 1, 2, 6], 2),
        BucketBatchSampler([3, 1, 2, 5], 2, seed=1),
        TokenBudgetBatchSampler([3, 1, 2, 5], 16),
    ):
        with pytest.raises(ValueError, match="resume with the same data and settings"):
            other.load_state_dict(state)
    for wrong in ({"done": 3}, {"done": -1}, {"epoch": -1}, {"epoch": 5, "done": 3}):
        with pytest.raises(ValueError):
            sampler.load_state_dict({**state, **wrong})
    assert sampler.state_dict() == state


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: BucketBatchSampler([2, 3], 3, drop_last=True), "2 examples make no full step"),
        (lambda: BucketBatchSampler([2, 3], 1, rank=2, ranks=2), "rank=2 does not exist"),
        (lambda: BucketBatchSampler([2, 3], 4, ranks=3), "2 examples are too few for 3 ranks"),
        (lambda: BucketBatchSampler([2, 3, 4], 1, ranks=2), "use batch_size=2 or more"),
        (lambda: BucketBatchSampler([2, 0], 1), "Example 1 has length 0"),
        (lambda: TokenBudgetBatchSampler([9, 17], 16), "Example 1 takes 24 padded .* budget of 16"),
        (lambda: TokenBudgetBatchSampler([8, 8, 8], 8, ranks=2).batches(), "one by one"),
    ],
)
def test_bad_numbers_are_refused_in_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_data_loader_takes_sampler_and_collator_and_resumes():
    documents = [{"input_ids": list(range(1, 2 + 7 * row % 23)), "labels": 0} for row in range(30)]
    lengths = np.array([len(row["input_ids"]) for row in documents])
    collator = pickle.loads(pickle.dumps(Collator(0, classes=3)))
    sampler, again = (BucketBatchSampler(lengths, 4, window=2) for _ in range(2))
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=collator)
    whole, batches = list(loader), iter(loader)
    assert sum(int(batch["attention_mask"].sum()) for batch in whole) == lengths.sum()
    next(batches), next(batches)
    again.load_state_dict(sampler.state_dict())
    rest = list(DataLoader(documents, batch_sampler=again, collate_fn=collator))
    assert len(rest) == len(whole) - 2
    assert all(torch.equal(a[name], b[name]) for a, b in zip(rest, whole[2:]) for name in a)

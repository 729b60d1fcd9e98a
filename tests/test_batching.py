"""Orders, samplers and the collator: every row once, the same again, resumable, no more padding than promised."""
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.utils.data import DataLoader
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, PreTrainedTokenizerFast
from transformers.trainer_pt_utils import get_length_grouped_indices

from helpers.data.batching import (bucketed, epoch_cost, epoch_order, length_sorted, padded_length, padded_share,
                                   restore, shuffled)
from helpers.data.collate import IGNORE, Collator, pad
from helpers.data.samplers import BucketBatchSampler, TokenBudgetBatchSampler

prop = settings(deadline=None, max_examples=60)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=120)
SEEDS = st.integers(0, 2**32 - 1)
MICRO, PARTS, WINDOW, EPOCH = st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 50)


def flat(batches):
    return [row for batch in batches for row in batch]


def micro(groups):
    return [batch for group in groups for batch in group]


# Orders

def test_the_order_is_pinned():
    """Saved runs resume into it: another order would repeat some rows and leave out others."""
    assert epoch_order(7, 0, 0) == [4, 0, 5, 3, 2, 6, 1]
    assert epoch_order(8, 3, 2) == torch.randperm(8, generator=torch.Generator().manual_seed(3_000_011)).tolist()
    assert bucketed([5, 1, 4, 2, 3, 9, 7], 4, 2, 1, 0, 0) == [[[0, 5], [3, 4]], [[1, 2], [6]]]


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS, EPOCH)
def test_groups_hold_every_row_once_and_end_with_the_end_of_the_permutation(lengths, size, parts, window, seed, epoch):
    rows, batch = len(lengths), size * parts
    order = epoch_order(rows, seed, epoch)
    full = rows - rows % batch
    for groups in (shuffled(rows, batch, size, seed, epoch), bucketed(lengths, batch, size, window, seed, epoch)):
        assert sorted(flat(micro(groups))) == list(range(rows))
        assert [sum(map(len, group)) for group in groups] == [batch] * (rows // batch) + [rows % batch] * (rows > full)
        assert all(len(part) == size for group in groups[:rows // batch] for part in group)
        assert set(flat(micro(groups[rows // batch:]))) == set(order[full:])
        assert all(part for group in groups for part in group) and all(len(part) <= size for part in micro(groups))
    assert flat(micro(shuffled(rows, batch, size, seed, epoch))) == order


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS, EPOCH)
def test_a_window_s_micro_batches_do_not_overlap_in_length(lengths, size, parts, window, seed, epoch):
    batch = size * parts
    order = epoch_order(len(lengths), seed, epoch)
    full = len(order) - len(order) % batch
    found = micro(bucketed(lengths, batch, size, window, seed, epoch)[:full // batch])
    for start in range(0, full, window * batch):
        mine = set(order[start:min(start + window * batch, full)])
        parts_here = [part for part in found if mine & set(part)]
        assert set(flat(parts_here)) == mine
        spans = sorted((lengths[part[0]], lengths[part[-1]]) for part in parts_here)
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:]))


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS, st.integers(1, 3))
def test_wider_windows_never_pad_more(lengths, size, parts, window, seed, factor):
    """Sorting is the best cut into equal micro-batches, so windows that hold whole windows can only gain.

    Only for rows that the batch size divides: where the smaller, last micro-batch lies is a matter of luck.
    """
    batch = size * parts
    lengths = lengths[:len(lengths) - len(lengths) % batch]
    assume(lengths)
    costs = [epoch_cost(micro(groups), lengths) for groups in (
        shuffled(len(lengths), batch, size, seed, 0), bucketed(lengths, batch, size, window, seed, 0),
        bucketed(lengths, batch, size, window * factor, seed, 0), bucketed(lengths, batch, size, 1000, seed, 0))]
    paddings = [cost.padding for cost in costs]
    assert paddings == sorted(paddings, reverse=True)
    assert len({cost.real for cost in costs}) == 1
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert costs[-1] == epoch_cost([ascending[i:i + size] for i in range(0, len(lengths), size)], lengths)


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS)
def test_no_order_pads_more_than_the_fixed_length(lengths, size, parts, window, seed):
    fixed = padded_length(max(lengths))
    orders = [micro(shuffled(len(lengths), size * parts, size, seed, 0)),
              micro(bucketed(lengths, size * parts, size, window, seed, 0)), length_sorted(lengths, size),
              TokenBudgetBatchSampler(lengths, 64, window, seed).batches()]
    for batches in orders:
        assert 0 <= padded_share(batches, lengths) <= padded_share(batches, lengths, length=fixed) < 1
        assert epoch_cost(batches, lengths, length=fixed).pairs == len(lengths) * fixed**2


@prop
@given(st.lists(st.integers(1, 60), min_size=30, max_size=60), MICRO, SEEDS, SEEDS, EPOCH)
def test_another_seed_or_epoch_gives_another_order(lengths, size, seed, other, epoch):
    assume(seed != other)
    rows = len(lengths)
    assert epoch_order(rows, seed, epoch) != epoch_order(rows, other, epoch)
    assert epoch_order(rows, seed, epoch) != epoch_order(rows, seed, epoch + 1)
    torch.rand(3)  # the global generator plays no part
    assert bucketed(lengths, size, size, 2, seed, epoch) == bucketed(lengths, size, size, 2, seed, epoch)
    assert bucketed(lengths, 1, 1, 2, seed, epoch) != bucketed(lengths, 1, 1, 2, other, epoch)


def test_short_and_long_micro_batches_are_mixed_in_time():
    """Sorted without shuffling, the first half of an epoch would be the short half."""
    lengths = list(range(1, 1025))
    firsts = [lengths[group[0][0]] for group in bucketed(lengths, 8, 8, 128, 0, 0)]
    half = len(firsts) // 2
    assert abs(np.mean(firsts[:half]) - np.mean(firsts[half:])) < 150  # sorted: 512


def test_windows_pad_about_as_little_as_the_library_s_own_grouping():
    lengths = np.random.default_rng(0).geometric(0.02, 3000).clip(max=256).tolist()
    dice = torch.Generator().manual_seed(0)
    order = get_length_grouped_indices(lengths, 16, mega_batch_mult=50, generator=dice)
    theirs = padded_share([order[i:i + 16] for i in range(0, 3000, 16)], lengths)
    ours = padded_share(micro(bucketed(lengths, 16, 16, 50, 0, 0)), lengths)
    random = padded_share(micro(shuffled(3000, 16, 16, 0, 0)), lengths)
    assert ours == pytest.approx(theirs, abs=0.02) and ours < random / 3


# Inference

@prop
@given(LENGTHS, st.integers(1, 9))
def test_inference_runs_from_long_to_short_and_its_order_is_restored(lengths, size):
    batches = length_sorted(torch.tensor(lengths), size)
    assert [lengths[row] for row in flat(batches)] == sorted(lengths, reverse=True)
    values = torch.arange(2 * len(lengths)).view(-1, 2)
    out = torch.cat([values[batch] for batch in batches])
    assert torch.equal(restore(out, batches), values)
    assert restore([f"row {row}" for row in flat(batches)], batches) == [f"row {row}" for row in range(len(lengths))]


def test_what_cannot_be_restored_is_refused():
    for batches in ([[0, 0]], [[1, 2]], [[0], [2]]):
        with pytest.raises(ValueError, match="every row exactly once"):
            restore([1, 2], batches)
    with pytest.raises(ValueError, match="3 results for 2 rows"):
        restore([1, 2, 3], [[1, 0]])


# Samplers

@st.composite
def samplers(draw, ranks=st.integers(1, 4)):
    """A function that makes one rank's sampler, with settings that make batches, and what it was made of."""
    lengths, seed, drop, many = draw(LENGTHS), draw(SEEDS), draw(st.booleans()), draw(ranks)
    window, budget, size = draw(WINDOW), draw(st.booleans()), draw(MICRO)
    assume(len(lengths) >= many)
    if budget:
        tokens = draw(st.integers(64, 300))
        make = lambda rank=0: TokenBudgetBatchSampler(lengths, tokens, window, seed, drop, rank, many)  # noqa: E731
    else:
        assume(len(lengths) >= size * many if drop else size > 1 or len(lengths) % many == 0)
        make = lambda rank=0: BucketBatchSampler(lengths, size, window, seed, drop, rank, many)  # noqa: E731
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
def test_over_all_ranks_every_row_comes_once_in_equally_many_steps(case, epoch):
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
        for step in zip(*epochs):
            sizes = [len(batch) for batch in step]
            assert max(sizes) <= sampler.batch_size and max(sizes) - min(sizes) <= 1
        full = len(lengths) // (sampler.batch_size * ranks) - 1
        assert all(len(batch) == sampler.batch_size for batches in epochs for batch in batches[:full])
    else:
        assert all(len(batch) * padded_length(max(lengths[row] for row in batch)) <= sampler.tokens
                   for batches in epochs for batch in batches)


@prop
@given(LENGTHS, st.integers(1, 6), WINDOW, SEEDS, EPOCH)
def test_one_rank_s_sampler_is_the_bucketed_order(lengths, size, window, seed, epoch):
    sampler = BucketBatchSampler(lengths, size, window, seed)
    sampler.set_epoch(epoch)
    assert list(sampler) == micro(bucketed(lengths, size, size, window, seed, epoch))


@prop
@given(st.integers(2, 4), st.integers(2, 5), SEEDS)
def test_the_ranks_of_a_step_meet_rows_of_like_length(ranks, size, seed):
    lengths = list(range(1, 16 * ranks * size + 1))
    epochs = [BucketBatchSampler(lengths, size, 16, seed, rank=rank, ranks=ranks).batches() for rank in range(ranks)]
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
        assert list(resumed) == make_epoch(make(rank), epoch)  # the next time it is a whole epoch again
    assert list(batches) == whole[done:]
    sampler.set_epoch(epoch + 1)
    assert sampler.state_dict()["done"] == 0


def make_epoch(sampler, epoch):
    sampler.set_epoch(epoch)
    return sampler.batches()


def test_a_state_of_another_order_or_beyond_the_epoch_is_refused():
    sampler = BucketBatchSampler([3, 1, 2, 5], 2)
    state = sampler.state_dict()
    for other in (BucketBatchSampler([3, 1, 2], 2), BucketBatchSampler([3, 1, 2, 6], 2),
                  BucketBatchSampler([3, 1, 2, 5], 1), BucketBatchSampler([3, 1, 2, 5], 2, seed=1), TokenBudgetBatchSampler([3, 1, 2, 5], 16)):
        with pytest.raises(ValueError, match="resume with the same data and settings"):
            other.load_state_dict(state)
    for wrong in ({"done": 3}, {"done": -1}, {"epoch": -1}):
        with pytest.raises(ValueError):
            sampler.load_state_dict({**state, **wrong})
    assert sampler.state_dict() == state
    with pytest.raises(TypeError, match="done=None"):
        sampler.load_state_dict({name: value for name, value in state.items() if name != "done"})


@pytest.mark.parametrize("make, message", [
    (lambda: BucketBatchSampler([2, 3], 3, drop_last=True), "2 rows make no full step of 3"),
    (lambda: BucketBatchSampler([2, 3], 1, rank=2, ranks=2), "rank=2 does not exist"),
    (lambda: BucketBatchSampler([2, 3], 4, ranks=3), "2 rows are too few for 3 ranks"),
    (lambda: BucketBatchSampler([2, 3, 4], 1, ranks=2), "use batch_size=2 or more"),
    (lambda: BucketBatchSampler([2, 0], 1), "Row 1 has length 0"),
    (lambda: BucketBatchSampler([2, -4], 1), "Row 1 has length -4"),
    (lambda: BucketBatchSampler([], 1), "no rows"),
    (lambda: BucketBatchSampler([2], 0), "batch_size=0 must be at least 1"),
    (lambda: BucketBatchSampler([2], 1, seed=2**32), "below 2\\*\\*32"),
    (lambda: BucketBatchSampler([2], 1).set_epoch(-1), "epoch=-1"),
    (lambda: TokenBudgetBatchSampler([9, 17], 16), "Row 1 takes 24 padded tokens, more than the budget of 16"),
    (lambda: TokenBudgetBatchSampler([8, 8, 8], 8, ranks=2).batches(), "one by one"),
    (lambda: bucketed([2, 3], 4, 3, 1, 0, 0), "micro_batch=3 does not divide batch_size=4"),
    (lambda: bucketed([2, 3], 2, 2, 0, 0, 0), "window=0"),
    (lambda: shuffled(0, 2, 2, 0, 0), "rows=0"),
    (lambda: epoch_order(4, -1, 0), "seed=-1"),
    (lambda: padded_share([], [1]), "no batches"),
    (lambda: epoch_cost([[0], []], [1]), "holds no rows"),
    (lambda: epoch_cost([[0, 1]], [4, 9], length=8), "Row 1 of the batch has 9 tokens, more than 8"),
])
def test_bad_numbers_are_refused_in_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: bucketed([2, 1.5], 1, 1, 1, 0, 0), lambda: epoch_order(True, 0, 0),
                                  lambda: BucketBatchSampler([2], 1.0), lambda: length_sorted([True], 1)])
def test_numbers_that_are_not_whole_are_type_errors(make):
    with pytest.raises(TypeError, match="whole number"):
        make()


# The collator

IDS = st.lists(st.integers(1, 99), min_size=1, max_size=40)


def tokenizer(side):
    from tokenizers import Tokenizer, models
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0})), pad_token="[PAD]",
                                   padding_side=side)


@prop
@given(st.lists(IDS, min_size=1, max_size=8), st.sampled_from(["left", "right"]), st.sampled_from([1, 8]), st.data())
def test_the_collator_agrees_with_the_library_s(rows, side, multiple_of, data):
    labels = [data.draw(st.integers(0, 3)) for _ in rows]
    features = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels)]
    ours = pad(features, 0, multiple_of, side=side, classes=4)
    theirs = DataCollatorWithPadding(tokenizer(side), pad_to_multiple_of=multiple_of)([dict(row) for row in features])
    assert set(ours) == set(theirs)
    for name, values in ours.items():
        assert values.dtype == torch.int64 and torch.equal(values, theirs[name])
    tagged = [{"input_ids": row, "labels": [token % 3 for token in row]} for row in rows]
    ours = pad(tagged, 0, multiple_of, side=side)
    collator = DataCollatorForTokenClassification(tokenizer(side), pad_to_multiple_of=multiple_of)
    assert torch.equal(ours["labels"], collator([dict(row) for row in tagged])["labels"])
    assert (ours["labels"] == IGNORE).equal(ours["attention_mask"] == 0)


@prop
@given(st.lists(IDS, min_size=1, max_size=8), st.sampled_from(["left", "right"]), st.sampled_from([1, 8, 64]))
def test_the_collator_round_trips_and_takes_padded_rows(rows, side, multiple_of):
    batch = pad(rows, 7, multiple_of, side=side)
    assert [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"])] == rows
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 7).all()
    assert batch["input_ids"].shape[1] == padded_length(max(map(len, rows)), multiple_of)
    cost = epoch_cost([list(range(len(rows)))], [len(row) for row in rows], multiple_of)
    assert cost.real + cost.padding == batch["input_ids"].numel()
    again = [{name: batch[name][row] for name in batch} for row in range(len(rows))]
    wide = pad(again, 7, length=64, side=side)
    assert wide["input_ids"].shape == (len(rows), 64)
    trimmed = pad([{name: wide[name][row] for name in wide} for row in range(len(rows))], 7, multiple_of, side=side)
    assert all(torch.equal(trimmed[name], batch[name]) for name in batch)


@prop
@given(st.lists(IDS, min_size=1, max_size=8), st.integers(1, 50))
def test_too_long_documents_are_refused_or_cut(rows, limit):
    cut = {"length": pad(rows, 0, length=limit, truncate=True), "max": pad(rows, 0, max_length=limit, truncate=True)}
    for batch in cut.values():
        assert [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"])] == [
            row[:limit] for row in rows]
        assert batch["input_ids"].shape[1] <= limit
    assert cut["length"]["input_ids"].shape[1] == limit
    if max(map(len, rows)) > limit:
        for limits in ({"length": limit}, {"max_length": limit}):
            with pytest.raises(ValueError, match=f"more than {limit}"):
                pad(rows, 0, **limits)


@pytest.mark.parametrize("rows, message", [
    ([], "no rows"),
    ([[1], []], "Row 1 is an empty document"),
    ([{"input_ids": [1, 2], "attention_mask": [0, 0]}], "Row 0 is an empty document"),
    ([{"input_ids": [1], "labels": 4}], "Row 0 has label 4: labels go from 0 to 3"),
    ([{"input_ids": [1], "label": -100}], "Row 0 has label -100"),
    ([{"input_ids": [1, 2], "labels": [0, 9]}], "Row 0 has label 9"),
    ([{"input_ids": [1, 2], "labels": [-1, 0]}], "Row 0 has label -1"),
    ([{"input_ids": [1, 2], "labels": [0]}], "one label a token"),
    ([{"input_ids": [[1, 2]]}], "one list of token ids"),
    ([{"input_ids": [1, 2], "attention_mask": [1]}], "2 tokens and an attention_mask of 1"),
    ([{"input_ids": [1], "labels": 0}, [1]], "Some rows have no labels"),
    ([{"input_ids": [1], "token_type_ids": [0]}], "columns input_ids, token_type_ids"),
])
def test_bad_documents_are_refused_in_a_sentence(rows, message):
    with pytest.raises(ValueError, match=message):
        pad(rows, 0, classes=4)
    with pytest.raises(ValueError, match="side='top'"):
        pad([[1]], 0, side="top")
    with pytest.raises(TypeError, match="Row 0 has input_ids of torch.float32"):
        pad([[1.5]], 0)
    with pytest.raises(ValueError, match="are not negative"):
        pad([{"input_ids": [1], "labels": -1}], 0)


def test_a_data_loader_takes_sampler_and_collator_and_resumes():
    documents = [{"input_ids": list(range(1, 2 + 7 * row % 23)), "labels": row % 3} for row in range(30)]
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

"""Orders: every example once, the same again, no more padding than promised, restored exactly."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from by_hand.padding import epoch_cost, padded_share, restore
from helpers.batching import bucketed, epoch_order, length_sorted, padded_length, shuffled

prop = settings(deadline=None, max_examples=60)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=120)
SEEDS = st.integers(0, 2**32 - 1)
MICRO, PARTS, WINDOW, EPOCH = (
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 50),
)


def flat(batches):
    return [row for batch in batches for row in batch]


def micro(groups):
    return [batch for group in groups for batch in group]


def test_the_order_is_pinned():
    """Saved runs resume into it: another order would repeat some examples and leave out others."""
    assert epoch_order(7, 0, 0) == [4, 0, 5, 3, 2, 6, 1]
    assert (
        epoch_order(8, 3, 2)
        == torch.randperm(8, generator=torch.Generator().manual_seed(3_000_011)).tolist()
    )
    assert bucketed([5, 1, 4, 2, 3, 9, 7], 4, 2, 1, 0, 0) == [[[0, 5], [3, 4]], [[1, 2], [6]]]


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS, EPOCH)
def test_groups_hold_every_example_once_and_end_with_the_end_of_the_permutation(
    lengths, size, parts, window, seed, epoch
):
    rows, batch = len(lengths), size * parts
    order = epoch_order(rows, seed, epoch)
    full = rows - rows % batch
    for groups in (
        shuffled(rows, batch, size, seed, epoch),
        bucketed(lengths, batch, size, window, seed, epoch),
    ):
        assert sorted(flat(micro(groups))) == list(range(rows))
        assert [sum(map(len, group)) for group in groups] == [batch] * (rows // batch) + [
            rows % batch
        ] * (rows > full)
        assert all(len(part) == size for group in groups[: rows // batch] for part in group)
        assert set(flat(micro(groups[rows // batch :]))) == set(order[full:])
        assert all(part for group in groups for part in group)
        assert all(len(part) <= size for part in micro(groups))
    assert flat(micro(shuffled(rows, batch, size, seed, epoch))) == order


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS, EPOCH)
def test_a_window_s_micro_batches_do_not_overlap_in_length(
    lengths, size, parts, window, seed, epoch
):
    batch = size * parts
    order = epoch_order(len(lengths), seed, epoch)
    full = len(order) - len(order) % batch
    found = micro(bucketed(lengths, batch, size, window, seed, epoch)[: full // batch])
    for start in range(0, full, window * batch):
        mine = set(order[start : min(start + window * batch, full)])
        parts_here = [part for part in found if mine & set(part)]
        assert set(flat(parts_here)) == mine
        spans = sorted((lengths[part[0]], lengths[part[-1]]) for part in parts_here)
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:]))


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS, st.integers(1, 3))
def test_wider_windows_never_pad_more(lengths, size, parts, window, seed, factor):
    """Sorting gives the best cut into equal micro-batches, so a window of whole windows only gains.

    This holds for a number of examples that the batch size divides: otherwise it depends on chance
    where the smaller, last micro-batch lies.
    """
    batch = size * parts
    lengths = lengths[: len(lengths) - len(lengths) % batch]
    assume(lengths)
    costs = [
        epoch_cost(micro(groups), lengths)
        for groups in (
            shuffled(len(lengths), batch, size, seed, 0),
            bucketed(lengths, batch, size, window, seed, 0),
            bucketed(lengths, batch, size, window * factor, seed, 0),
            bucketed(lengths, batch, size, 1000, seed, 0),
        )
    ]
    paddings = [cost.padding for cost in costs]
    assert paddings == sorted(paddings, reverse=True)
    assert len({cost.real for cost in costs}) == 1
    ascending = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert costs[-1] == epoch_cost(
        [ascending[i : i + size] for i in range(0, len(lengths), size)], lengths
    )


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS)
def test_no_order_pads_more_than_the_fixed_length(lengths, size, parts, window, seed):
    fixed = padded_length(max(lengths))
    orders = [
        micro(shuffled(len(lengths), size * parts, size, seed, 0)),
        micro(bucketed(lengths, size * parts, size, window, seed, 0)),
        length_sorted(lengths, size),
    ]
    for batches in orders:
        assert (
            0 <= padded_share(batches, lengths) <= padded_share(batches, lengths, length=fixed) < 1
        )
        assert epoch_cost(batches, lengths, length=fixed).pairs == len(lengths) * fixed**2


@prop
@given(st.lists(st.integers(1, 60), min_size=30, max_size=60), MICRO, SEEDS, SEEDS, EPOCH)
def test_another_seed_or_epoch_gives_another_order(lengths, size, seed, other, epoch):
    assume(seed != other)
    rows = len(lengths)
    assert epoch_order(rows, seed, epoch) != epoch_order(rows, other, epoch)
    assert epoch_order(rows, seed, epoch) != epoch_order(rows, seed, epoch + 1)
    torch.rand(3)  # the global generator plays no part
    assert bucketed(lengths, size, size, 2, seed, epoch) == bucketed(
        lengths, size, size, 2, seed, epoch
    )
    assert bucketed(lengths, 1, 1, 2, seed, epoch) != bucketed(lengths, 1, 1, 2, other, epoch)


def test_short_and_long_micro_batches_are_mixed_in_time():
    """Sorted without shuffling, the first half of an epoch would be the short half."""
    lengths = list(range(1, 1025))
    firsts = [lengths[group[0][0]] for group in bucketed(lengths, 8, 8, 128, 0, 0)]
    half = len(firsts) // 2
    assert abs(np.mean(firsts[:half]) - np.mean(firsts[half:])) < 150  # sorted: 512


@prop
@given(LENGTHS, st.integers(1, 9))
def test_inference_runs_from_long_to_short_and_its_order_is_restored(lengths, size):
    batches = length_sorted(torch.tensor(lengths), size)
    assert [lengths[row] for row in flat(batches)] == sorted(lengths, reverse=True)
    values = torch.arange(2 * len(lengths)).view(-1, 2)
    out = torch.cat([values[batch] for batch in batches])
    assert torch.equal(restore(out, batches), values)
    assert restore([f"row {row}" for row in flat(batches)], batches) == [
        f"row {row}" for row in range(len(lengths))
    ]


def test_what_cannot_be_restored_is_refused():
    for batches in ([[0, 0]], [[1, 2]], [[0], [2]]):
        with pytest.raises(ValueError, match="every example exactly once"):
            restore([1, 2], batches)
    with pytest.raises(ValueError, match="3 results for 2 examples"):
        restore([1, 2, 3], [[1, 0]])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: bucketed([2, 3], 4, 3, 1, 0, 0), "micro_batch=3 does not divide batch_size=4"),
        (lambda: bucketed([2, 3], 2, 2, 0, 0, 0), "window=0"),
        (lambda: shuffled(0, 2, 2, 0, 0), "examples=0"),
        (lambda: epoch_order(4, -1, 0), "seed=-1"),
        (lambda: padded_share([], [1]), "no batches"),
        (lambda: epoch_cost([[0], []], [1]), "holds no examples"),
        (
            lambda: epoch_cost([[0, 1]], [4, 9], length=8),
            "Example 1 of the batch has 9 tokens, more than 8",
        ),
    ],
)
def test_bad_numbers_are_refused_in_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Orders: every example once, the same again, no more padding than promised, restored exactly."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from by_hand.padding import epoch_cost, restore
from helpers.batching import bucketed, epoch_order, length_sorted, padded_length, shuffled

prop = settings(deadline=None, max_examples=60)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=120)
SEEDS = st.integers(0, 2**32 - 1)
MICRO, PARTS, WINDOW, EPOCH = (st.integers(*ends) for ends in ((1, 6), (1, 4), (1, 5), (0, 50)))


def flat(batches):
    return [row for batch in batches for row in batch]


def test_the_order_is_pinned():
    """Saved runs resume into it: another order would repeat some examples and leave out others."""
    assert epoch_order(7, 0, 0) == [4, 0, 5, 3, 2, 6, 1]
    third = torch.Generator().manual_seed(3_000_011)
    assert epoch_order(8, 3, 2) == torch.randperm(8, generator=third).tolist()
    assert bucketed([5, 1, 4, 2, 3, 9, 7], 4, 2, 1, 0, 0) == [[[0, 5], [3, 4]], [[1, 2], [6]]]


@prop
@given(LENGTHS, MICRO, PARTS, WINDOW, SEEDS, EPOCH)
def test_groups_hold_every_example_once_and_windows_do_not_overlap_in_length(
    lengths, size, parts, window, seed, epoch
):
    rows, batch = len(lengths), size * parts
    order = epoch_order(rows, seed, epoch)
    whole, left = divmod(rows, batch)
    plain = shuffled(rows, batch, size, seed, epoch)
    groups = bucketed(lengths, batch, size, window, seed, epoch)
    for these in (plain, groups):
        assert sorted(flat(flat(these))) == list(range(rows))
        assert [sum(map(len, group)) for group in these] == [batch] * whole + [left] * (left > 0)
        assert all(len(part) == size for part in flat(these[:whole]))
        assert all(0 < len(part) <= size for part in flat(these))
        assert set(flat(flat(these[whole:]))) == set(order[whole * batch :])
    assert flat(flat(plain)) == order
    found = flat(groups[:whole])
    for start in range(0, whole * batch, window * batch):
        mine = set(order[start : min(start + window * batch, whole * batch)])
        here = [part for part in found if mine & set(part)]
        assert set(flat(here)) == mine
        spans = sorted((lengths[part[0]], lengths[part[-1]]) for part in here)
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
    orders = [flat(shuffled(len(lengths), batch, size, seed, 0))]
    for width in (window, window * factor, 1000):
        orders.append(flat(bucketed(lengths, batch, size, width, seed, 0)))
    fixed = epoch_cost(orders[0], lengths, length=padded_length(max(lengths)))
    costs = [fixed, *(epoch_cost(order, lengths) for order in orders)]
    paddings = [cost.padding for cost in costs]
    assert paddings == sorted(paddings, reverse=True)
    assert {cost.real for cost in costs} == {sum(lengths)}
    assert fixed.pairs == len(lengths) * padded_length(max(lengths)) ** 2
    assert costs[-1] == epoch_cost(length_sorted(lengths, size), lengths)


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
    assert torch.equal(restore(torch.cat([values[batch] for batch in batches]), batches), values)
    assert restore(flat(batches), batches) == list(range(len(lengths)))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: restore([1, 2], [[0, 0]]), "every example exactly once"),
        (lambda: restore([1, 2], [[0], [2]]), "every example exactly once"),
        (lambda: restore([1, 2, 3], [[1, 0]]), "3 results for 2 examples"),
        (lambda: bucketed([2, 3], 4, 3, 1, 0, 0), "micro_batch=3 does not divide batch_size=4"),
        (lambda: epoch_cost([[0, 1]], [4, 9], length=8), "Example 1 .* 9 tokens, more than 8"),
    ],
)
def test_what_cannot_be_ordered_is_refused_in_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()

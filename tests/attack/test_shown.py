"""Data, tables and figures: lengths, batches, labels, runs and plans that are none."""

import math

import pytest

from by_hand import packing
from helpers import batching, plots, sets, show, tables
from helpers.plan import plan
from helpers.recipe import Recipe
from tests.attack import refused
from tests.attack.test_plans import HUGE, NUMBERS, THINGS, WRONG, short

NO_LENGTHS = (None, "", "abc", 3, 1.5, [], [0], [-1], [1.5], ["4"], [True], {}, {1: 2}, object)


@pytest.mark.parametrize("lengths", NO_LENGTHS, ids=short)
@pytest.mark.parametrize(
    "call",
    [
        lambda lengths: batching.length_sorted(lengths, 2),
        lambda lengths: batching.bucketed(lengths, 2, 1, 4, 0, 0),
        lambda lengths: batching.epoch_cost([[0]], lengths),
        lambda lengths: packing.pack(lengths, 8),
    ],
    ids=["length_sorted", "bucketed", "epoch_cost", "pack"],
)
def test_lengths_are_whole_numbers_of_tokens(call, lengths):
    refused(WRONG, [], lambda: call(lengths))


@pytest.mark.parametrize("number", [*NUMBERS, 0, -1, 1.5], ids=short)
@pytest.mark.parametrize(
    "name, call",
    [
        ("batch_size", lambda number: batching.length_sorted([1, 2], number)),
        ("batch_size", lambda number: batching.shuffled(9, number, 1, 0, 0)),
        ("micro_batch", lambda number: batching.shuffled(9, 2, number, 0, 0)),
        ("window", lambda number: batching.bucketed([1, 2], 2, 1, number, 0, 0)),
        ("capacity", lambda number: packing.pack([1, 2], number)),
        ("longest", batching.padded_length),
        ("multiple_of", lambda number: batching.padded_length(9, number)),
    ],
)
def test_sizes_are_whole_numbers(name, call, number):
    refused(WRONG, name, lambda: call(number))


@pytest.mark.parametrize("batches", [None, 3, "ab", [3], [[0.5]], [["a"]], {}, object], ids=short)
def test_batches_are_lists_of_examples(batches):
    refused(WRONG, [], lambda: batching.restore([1], batches))
    refused(WRONG, [], lambda: batching.epoch_cost(batches, [4]))


@pytest.mark.parametrize("batches", [[[1]], [[-1]], [[0], [7]]], ids=short)
def test_a_batch_names_examples_that_are_there(batches):
    refused(ValueError, "names an example", lambda: batching.epoch_cost(batches, [4]))


@pytest.mark.parametrize(
    "labels", [None, "abc", 3, 1.5, {}, [1.5], ["a"], [[1]], object], ids=short
)
@pytest.mark.parametrize("order", [sets.balanced_order, sets.proportional_order])
def test_labels_are_whole_numbers(order, labels):
    refused(TypeError, "labels", lambda: order(labels))


@pytest.mark.parametrize("seed", [*NUMBERS, -1, 1.5, 2**32], ids=short)
def test_a_subset_has_a_seed(seed):
    refused(WRONG, "seed", lambda: sets.balanced_order([0, 1], seed))


@pytest.mark.parametrize("thing", THINGS, ids=short)
@pytest.mark.parametrize("table", [tables.runs, tables.plans])
def test_a_table_has_runs_or_plans_by_label(table, thing):
    refused(WRONG, "named", lambda: table(thing))
    refused(WRONG, "named", lambda: table({"label": thing}))


@pytest.mark.parametrize("thing", THINGS, ids=short)
def test_a_comparison_has_two_runs(thing):
    refused(TypeError, "before", lambda: tables.before_after(thing, thing))
    refused(TypeError, "runs", lambda: show.before_and_after(thing, thing))


@pytest.mark.parametrize("thing", THINGS, ids=short)
def test_a_figure_of_losses_has_numbers(thing):
    refused(WRONG, "named", lambda: plots.losses(thing))
    if thing != [1]:
        refused(WRONG, "named", lambda: plots.losses({"label": thing}))


@pytest.mark.parametrize("smooth", [*NUMBERS, 0, -1, 1.5], ids=short)
def test_a_mean_is_over_a_whole_number_of_steps(smooth):
    refused(WRONG, "smooth", lambda: plots.losses({"label": [1.0, 2.0]}, smooth))


@pytest.mark.parametrize(
    "value", [None, "", "4", [], ["4"], [None], math.nan, math.inf, HUGE, object], ids=short
)
def test_bars_have_lengths(value):
    refused(WRONG, "values", lambda: plots.bars(value, "label"))
    refused(WRONG, "values", lambda: plots.bars({"name": value}, "label"))


@pytest.mark.parametrize("thing", THINGS, ids=short)
def test_figures_of_plans_have_plans(thing):
    refused(WRONG, "plans", lambda: plots.categories(thing))
    refused(WRONG, "plans", lambda: plots.timeline(thing))
    refused(WRONG, "plans", lambda: plots.categories({"label": thing}))


@pytest.mark.parametrize("thing", [thing for thing in THINGS if thing is not None], ids=short)
def test_a_line_is_the_memory_of_a_gpu(thing):
    planned = plan(Recipe(model="vit", batch_size=4))
    refused(WRONG, "gpu", lambda: plots.categories({"label": planned}, gpu=thing))
    if thing != 3:  # bytes
        refused(WRONG, "capacity", lambda: plots.timeline(planned, capacity=thing))

"""The recipe's field `padding` changes which examples meet, how long batches are, and no more."""

from itertools import product

import pytest

from helpers import measure, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.checks import PADDINGS

FIXED = Recipe(length=64, batch_size=16, train_size=50, test_size=120)


def epoch(recipe: Recipe, number: int = 0) -> list[list[list[int]]]:
    data = train.encoded(recipe)["train"]
    steps = -(-len(data) // recipe.batch_size)
    lengths = data.lengths.tolist()
    return [
        train.rows_of_step(recipe, len(data), number * steps + step, lengths)
        for step in range(steps)
    ]


def test_dynamic_sees_the_rows_of_fixed_and_both_pad_less_in_turn():
    def pads(recipe: Recipe) -> int:
        batch = train.encoded(recipe)["train"].batch
        parts = [part for group in epoch(recipe) for part in group]
        return sum(int((batch(part)["attention_mask"] == 0).sum()) for part in parts)

    fixed, dynamic, uniform = (
        replace(FIXED, length=128, padding=padding, accumulation=4) for padding in PADDINGS
    )
    assert epoch(dynamic) == epoch(fixed) and epoch(uniform, 0) != epoch(uniform, 1)
    for recipe, number in product((fixed, uniform), (0, 1)):
        groups = epoch(recipe, number)
        parts = [part for group in groups for part in group]
        assert sorted(row for part in parts for row in part) == list(range(50))
        assert all(1 <= len(part) <= 4 for part in parts)
        assert [sum(map(len, group)) for group in groups] == [16, 16, 16, 2]
    assert pads(uniform) < pads(dynamic) < pads(fixed)
    with pytest.raises(ValueError, match="give their lengths"):
        train.rows_of_step(uniform, 50, 0)


def test_a_batch_is_as_long_as_its_longest_row_rounded_up_to_eight():
    data = train.encoded(replace(FIXED, padding="dynamic"))["train"]
    for row in range(len(data)):
        length = int(data.lengths[row])
        batch = data.batch([row])
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (1, -(-length // 8) * 8)
        assert batch["attention_mask"].sum() == length and batch["input_ids"].is_contiguous()


def test_accuracy_is_the_same_however_the_test_rows_are_padded():
    model = train.fit(replace(FIXED, steps=15), device="cpu", progress=False).model
    tests = [train.encoded(replace(FIXED, padding=padding))["test"] for padding in PADDINGS]
    assert len({train.evaluate(model, test, FIXED) for test in tests}) == 1


def test_the_plan_is_that_of_the_longest_batch():
    recipe = replace(FIXED, padding="dynamic", batch_size=4)
    data = train.encoded(recipe)["train"]
    assert (data.lengths == 64).sum() >= 4
    real, planned = measure.measure(recipe, data).tracked, plan(recipe, "cpu")
    assert real.peak == planned.peak == plan(replace(recipe, padding="fixed"), "cpu").peak
    assert (planned.timeline == real.timeline).all()

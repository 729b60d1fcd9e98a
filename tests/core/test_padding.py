"""The recipe's field `padding` changes which examples meet, how long batches are, and no more."""

import pytest

from helpers import measure, train
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.checks import PADDINGS

FIXED = Recipe(length=64, batch_size=16, train_size=50, test_size=120)


def epoch(recipe: Recipe, number: int = 0) -> list[list[list[int]]]:
    data = train.encoded(recipe)["train"]
    steps = -(-len(data) // recipe.batch_size)
    return [
        train.rows_of_step(recipe, len(data), number * steps + step, data.lengths.tolist())
        for step in range(steps)
    ]


def pads(recipe: Recipe, groups) -> int:
    data = train.encoded(recipe)["train"]
    return sum(
        int((data.batch(part)["attention_mask"] == 0).sum()) for group in groups for part in group
    )


def test_dynamic_sees_the_rows_of_fixed_and_both_pad_less_in_turn():
    fixed, dynamic, uniform = (
        replace(FIXED, length=128, padding=padding, accumulation=4) for padding in PADDINGS
    )
    assert epoch(dynamic) == epoch(fixed) and epoch(uniform, 0) != epoch(uniform, 1)
    for number in (0, 1):
        groups = epoch(uniform, number)
        assert sorted(row for group in groups for part in group for row in part) == list(range(50))
    assert pads(uniform, epoch(uniform)) < pads(dynamic, epoch(dynamic)) < pads(fixed, epoch(fixed))


def test_a_batch_is_as_long_as_its_longest_row_rounded_up_to_eight():
    data = train.encoded(replace(FIXED, padding="dynamic"))["train"]
    for row in range(len(data)):
        length = int(data.lengths[row])
        batch = data.batch([row])
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (1, -(-length // 8) * 8)
        assert batch["attention_mask"].sum() == length and batch["input_ids"].is_contiguous()


def test_accuracy_is_the_same_however_the_test_rows_are_padded():
    trained = train.fit(replace(FIXED, steps=15), device="cpu", progress=False)
    found = {
        train.evaluate(trained.model, train.encoded(replace(FIXED, padding=padding))["test"], FIXED)
        for padding in PADDINGS
    }
    assert len(found) == 1


def test_the_plan_is_that_of_the_longest_batch():
    recipe = replace(FIXED, padding="dynamic", batch_size=4)
    data = train.encoded(recipe)["train"]
    assert (data.lengths == 64).sum() >= 4
    real = measure.measure(recipe, data).tracked
    planned = plan(recipe, "cpu")
    assert real.peak == planned.peak == plan(replace(recipe, padding="fixed"), "cpu").peak
    assert (planned.timeline == real.timeline).all()


def test_uniform_needs_lengths():
    with pytest.raises(ValueError, match="give their lengths"):
        train.rows_of_step(replace(FIXED, padding="uniform"), 50, 0)

"""The table of epochs: shapes are those of the collator, and costs those of direct plans."""

import pytest

from by_hand.padding import padded_share
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from helpers.tables import cost_of_epoch, epochs

SMALL = Recipe("deberta", profile="mini", batch_size=4, length=128, padding="dynamic")
LENGTHS = [20, 128, 40, 61, 9, 33, 90, 12]
BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_length_between_the_planned_ones_costs_what_its_own_plan_says():
    """FLOPs are a parabola in the length, exactly; seconds nearly are."""
    direct = plan(replace(SMALL, length=112, padding="fixed"))
    shapes = [(4, 128), (4, 112), (1, 128)]
    long, flops, last = cost_of_epoch(SMALL, shapes, "flops")
    assert flops == pytest.approx(sum(direct.flops.values()), rel=1e-6)
    assert last == pytest.approx(long / 4)  # a smaller last batch costs its share
    seconds = cost_of_epoch(SMALL, shapes, "T4")[1]
    assert seconds == pytest.approx(direct.seconds("T4").total, rel=0.1)


def test_the_table_counts_padding_as_the_batches_have_it():
    fixed = replace(SMALL, padding="fixed")
    table = epochs({"fixed": (fixed, BATCHES), "dynamic": (SMALL, BATCHES)}, LENGTHS, ("T4",))
    shares = [padded_share(BATCHES, LENGTHS, length=128), padded_share(BATCHES, LENGTHS)]
    assert list(table.frame["padding"]) == [f"{share:.0%}" for share in shares]
    with pytest.raises(ValueError, match="give at least one recipe"):
        epochs({}, LENGTHS)
    with pytest.raises(ValueError, match="an example of 129 tokens, more than the recipe's 128"):
        epochs({"long": (SMALL, [[0]])}, [129])
    with pytest.raises(ValueError, match="Images have no padding"):
        epochs({"images": (Recipe("vit"), [[0]])}, [16])

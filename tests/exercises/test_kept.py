"""What checks of exercises keep, so that they answer at once: planned here anew."""

import pytest

from exercises import nb05, nb19
from helpers.plan import plan


def test_of_the_four_recipes_of_lesson_05_two_fit():
    pytest.importorskip("bitsandbytes")
    assert {name for name, one in nb05.OFFERED.items() if plan(one).fits(nb05.GPU)} == nb05.FIT


@pytest.mark.parametrize("situation", nb19.CHOICES)
def test_no_other_field_frees_as_much(situation):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    freed = {field: nb19.freed(situation, field) for field in nb19.CHOICES[situation][1]}
    assert max(freed, key=freed.__getitem__) == nb19.BEST[situation]
    assert sorted(freed.values())[-2] < 0.9 * max(freed.values())

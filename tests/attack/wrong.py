"""Values that are wrong, by kind, and the property that every entry point has for them.

A kind is a list of values that were once taken, or refused badly, and a strategy that draws more.
"""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attack import refused

WRONG = (ValueError, TypeError)
HUGE = 10**5000  # longer than Python is willing to write
SHORT = 300  # characters of a sentence about one value
TEXTS = st.text(max_size=12)
OTHERS = (
    st.binary(max_size=4)
    | st.complex_numbers()
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(TEXTS, st.integers(), max_size=2)
    | st.tuples(st.floats(), TEXTS)
)
NOTHING_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
ARRAYS = (np.array([4, 8]), torch.tensor([4, 8]), np.array(["a"]))

KNOWN: dict[str, tuple[Any, ...]] = {
    "thing": (None, "", "no such", 3, -1, 1.5, math.nan, HUGE, True, [], [1], {}, b"x", object,
              "x" * 9999, *ARRAYS),
    "no number": (None, "", "4", True, [], [4], {}, 1j, object, b"4", *ARRAYS),
    "not finite": (math.nan, math.inf, -math.inf, HUGE, -HUGE, np.float32("nan")),
    "another number": (Decimal(1), Fraction(1, 2)),
    "below 0": (-1, -(2**70)),
    "0": (0,),
    "a part": (0.5, 1.5, 4.0),
    "beyond": (2**40, 2**64, np.int64(2**40)),
    "no flag": (0, 1, -1, "", "yes", "True", None, 1.0, math.nan, [], {}, b"1", HUGE),
}  # fmt: skip
DRAWN = {
    "thing": st.none() | TEXTS | st.integers() | st.floats() | st.booleans() | OTHERS,
    "no number": st.none() | TEXTS | st.booleans() | OTHERS,
    "not finite": NOTHING_FINITE,
    "another number": st.decimals() | st.fractions(),
    "below 0": st.integers(max_value=-1),
    "0": st.just(0),
    "a part": st.floats(0.001, 1e9),
    "beyond": st.integers(min_value=2**40),
    "no flag": st.none() | TEXTS | st.integers() | st.floats() | OTHERS,
}
NO_NUMBER = ("no number", "not finite", "another number")
NO_WHOLE = (*NO_NUMBER, "a part", "below 0", "beyond")
NO_COUNT = (*NO_WHOLE, "0")


class Entry(NamedTuple):
    """An argument of something that a user calls.

    says   what the sentence about a wrong value names
    call   takes the value
    kinds  of wrong values
    more   wrong values of this argument alone
    but    values that it takes
    """

    says: str | list[str]
    call: Callable[[Any], Any]
    kinds: tuple[str, ...] = ("thing",)
    more: tuple[Any, ...] = ()
    but: tuple[Any, ...] = ()


def is_among(value: Any, some: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `some`, without asking arrays whether they are equal."""
    return any(value is one or type(value) is type(one) and value == one for one in some)


def refuses(entry: Entry, value: Any, errors=WRONG) -> None:
    """Assert that the argument refuses one value: the right error, one short sentence."""
    said = refused(errors, entry.says, lambda: entry.call(value))
    assert len(said) < SHORT, said


def refuses_all(entry: Entry, drawn: int = 40, errors=WRONG) -> None:
    """Assert that the argument refuses the known values of its kinds, and as many drawn ones."""
    for value in (*(one for kind in entry.kinds for one in KNOWN[kind]), *entry.more):
        if not is_among(value, entry.but):
            refuses(entry, value, errors)
    if not entry.kinds:
        return

    @settings(max_examples=drawn, deadline=None, derandomize=True, database=None)
    @given(st.one_of(*(DRAWN[kind] for kind in entry.kinds)))
    def every(value):
        if not is_among(value, entry.but):
            refuses(entry, value, errors)

    every()

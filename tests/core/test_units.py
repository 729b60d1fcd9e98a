"""Bytes, counts and seconds as text, above all where rounding crosses to the next unit."""

import re

import pytest

from tight_fit.units import GIB, MIB, duration, number, several, size, span


@pytest.mark.parametrize(
    "function, value, text",
    [(size, 9.37 * GIB, "9.37 GiB"), (size, GIB - 1, "1.00 GiB"),
     (size, GIB - 0.1 * MIB, "1023.9 MiB"), (size, MIB - 1, "1.0 MiB"),
     (size, -MIB + 1, "-1.0 MiB"), (size, 1023, "1023 bytes"), (size, 0, "0 bytes"),
     (size, None, "n/a"), (number, 184_000_000, "184 M"), (number, 999_400_000, "999 M"),
     (number, 999_500_000, "1 G"), (number, 999.6, "1 k"), (number, 2.48e12, "2.48 T"),
     (number, 1.5e15, "1500 T"), (number, None, "n/a"), (duration, 0.085, "85 ms"),
     (duration, 0.9996, "1.0 s"), (duration, 59.94, "59.9 s"), (duration, 59.96, "1 min 00 s"),
     (duration, 119.6, "2 min 00 s"), (duration, 125, "2 min 05 s"), (duration, None, "n/a"),
     (span, 2.5, "2.5 s"), (span, 0.1234, "123 ms"), (span, 0.000494, "0.494 ms"),
     (span, 0.99951, "1.0 s")],
)  # fmt: skip
def test_figures_and_units(function, value, text):
    assert function(value) == text


@pytest.mark.parametrize("function", [size, number, duration, span])
def test_no_text_is_a_thousand_of_a_unit_or_in_powers_of_ten(function):
    for power in range(-3, 14):
        for part in (0.99949, 0.9995, 0.99951, 0.99999, 1, 1.00001, 1.0005):
            text = function(part * 10.0**power)
            assert "e+" not in text and not re.match(r"1000 (ms|M|k|G)|1024.0", text), text


def test_one_example_and_many():
    assert several(1, "example") == "1 example" and several(0, "example") == "0 examples"

"""Bytes, counts and seconds as text, above all where rounding crosses to the next unit."""

import re

import pytest

from tight_fit.units import GIB, MIB, duration, number, several, size, span


@pytest.mark.parametrize(
    "function, texts",
    [
        (size, {9.37 * GIB: "9.37 GiB", GIB - 1: "1.00 GiB", GIB - 0.1 * MIB: "1023.9 MiB",
                -MIB + 1: "-1.0 MiB", 1023: "1023 bytes", 0: "0 bytes", None: "n/a"}),
        (number, {184_000_000: "184 M", 999_400_000: "999 M", 999_500_000: "1 G", 999.6: "1 k",
                  2.48e12: "2.48 T", 1.5e15: "1500 T", None: "n/a"}),
        (duration, {0.085: "85 ms", 0.9996: "1.0 s", 59.94: "59.9 s", 59.96: "1 min 00 s",
                    119.6: "2 min 00 s", 125: "2 min 05 s", None: "n/a"}),
        (span, {2.5: "2.5 s", 0.1234: "123 ms", 0.000494: "0.494 ms", 0.99951: "1.0 s"}),
        (lambda count: several(count, "example"), {1: "1 example", 0: "0 examples"}),
    ],
)  # fmt: skip
def test_figures_and_units(function, texts):
    assert {value: function(value) for value in texts} == texts


@pytest.mark.parametrize("function", [size, number, duration, span])
def test_no_text_is_a_thousand_of_a_unit_or_in_powers_of_ten(function):
    for power in range(-3, 14):
        for part in (0.99949, 0.9995, 0.99951, 0.99999, 1, 1.00001, 1.0005):
            text = function(part * 10.0**power)
            assert "e+" not in text and not re.match(r"1000 (ms|M|k|G)|1024.0", text), text

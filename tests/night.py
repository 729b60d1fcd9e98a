"""Parameters of a test, of which some wait for the night: by day a few stand for all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def few_by_day(values: Iterable[Any], by_day: Callable[[Any], bool] | int = 2) -> list[Any]:
    """The values as parameters. By day run those that `by_day` holds of, or every so-many-th.

    A tuple is the values of several parameters.
    """
    made = []
    for number, value in enumerate(values):
        day = by_day(value) if callable(by_day) else number % by_day == 0
        marks = () if day else pytest.mark.night
        made.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return made

"""Checks of values that a user gives. Each error says in one sentence what is wrong and what helps.

`name` is the name under which the user knows the value; it begins the message.
"""

from __future__ import annotations

import math
from collections.abc import Collection


def one_of(name: str, value: object, known: Collection[str]) -> None:
    """Raises ValueError where `value` is not among the `known` names, which the message lists."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r} is not known: use one of {', '.join(known)}.")


def true_or_false(name: str, value: object) -> None:
    """Raises TypeError where `value` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False.")


def whole(name: str, value: object, least: int) -> int:
    """Gives `value`. Raises TypeError for what is no int, ValueError for one below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}.")
    return value


def real(
    name: str, value: object, above: float | None = None, at_least: float | None = None
) -> float:
    """Gives `value`. Raises TypeError for what is no number, ValueError for one out of bounds.

    above, at_least  bounds from below, without and with the bound itself; None for no bound
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} must be a number.")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite.")
    if above is not None and value <= above:
        raise ValueError(f"{name}={value} must be above {above}.")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}.")
    return value

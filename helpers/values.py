"""Values that a user gives, checked: each error says in one sentence what was wrong and what to do."""

from __future__ import annotations


def one_of(name: str, value, known) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name}={value!r} is not known: use one of {', '.join(known)}.")


def whole(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}.")


def real(name: str, value, above: float | None = None, at_least: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} must be a number.")
    if not float("-inf") < value < float("inf"):
        raise ValueError(f"{name}={value} must be finite.")
    if above is not None and value <= above:
        raise ValueError(f"{name}={value} must be above {above}.")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}.")

"""Tests of the exercises."""

from collections.abc import Callable
from functools import partial

# Those whose check plans full-size models, which takes seconds.
FULL_SIZE = ("00.1", "00.2", "00.4", "02.2", "03.1", "03.2", "03.4", "05.4", "19.1", "19.2")


def mistakes(answer: Callable, *names: str) -> list[Callable]:
    """An answer with each of its mistakes, which its argument `wrong` names."""
    return [partial(answer, wrong=name) for name in names]

"""Several processes on one machine: one rank per GPU where there are enough, else on the CPU."""

from helpers import moved
from helpers.parallel.launcher import RankFailed, launch

__all__ = ["RankFailed", "launch"]


def __getattr__(name: str):
    if f"{__name__}.{name}" in moved.PLACES:
        moved.refuse(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

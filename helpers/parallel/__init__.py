"""Several processes on one machine: one rank per GPU where there are enough, else on the CPU."""

from helpers.parallel.launcher import RankFailed, launch

__all__ = ["RankFailed", "launch"]

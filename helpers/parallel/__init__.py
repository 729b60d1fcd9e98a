"""Several processes on one machine: one rank a GPU where there are enough, ranks on the CPU elsewhere."""
from helpers.parallel.ranks import RankFailed, launch

__all__ = ["RankFailed", "launch"]

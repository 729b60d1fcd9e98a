"""Several processes on one machine: one rank a GPU where there are enough, ranks on the CPU elsewhere."""
from helpers.parallel.layout import Parallel
from helpers.parallel.launcher import RankFailed, launch

__all__ = ["Parallel", "RankFailed", "launch"]

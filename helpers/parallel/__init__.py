"""Several processes on one machine: one rank a GPU where there are enough, ranks on the CPU elsewhere."""

from helpers.parallel.launcher import RankFailed, launch
from helpers.parallel.layout import Parallel

__all__ = ["Parallel", "RankFailed", "launch"]

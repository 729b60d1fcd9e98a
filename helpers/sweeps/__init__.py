"""Comparisons of accuracy that take longer than a lesson may: run by `make sweeps`, shown here.

    from helpers import sweeps

    sweeps.table("03_freezing")   # each arm at its own best learning rate, paired by seed
    sweeps.short("03_freezing")   # who wins, by how much, and whether the seeds are sure
    sweeps.figure("03_freezing")  # accuracy against learning rate

`benchmarks.sweeps` runs them and keeps every run in results/sweeps/. The table and the figure are
computed from the runs each time they are shown.
"""

from helpers.sweeps.results import Arm, Paired, Sweep, SweepRun, names, read
from helpers.sweeps.shown import figure, short, table

__all__ = ["Arm", "Paired", "Sweep", "SweepRun", "figure", "names", "read", "short", "table"]

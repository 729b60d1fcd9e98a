"""Comparisons of accuracy with tuned learning rates, run once and kept: `make sweeps`.

`plans` says what is compared, `trial` makes one run, `stages` decides which run is next.
"""

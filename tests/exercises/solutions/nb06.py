"""Answers to the exercises of notebook 06, right and wrong."""

import math
from functools import partial

from torch.utils.checkpoint import checkpoint

from tests.exercises import mistakes


def through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def keep_last(layers, x, segment, wrong="", **settings):
    """`wrong` is the mistake that it makes."""
    *early, last = (layers[start : start + segment] for start in range(0, len(layers), segment))
    if wrong == "plain":
        early, last = [], layers
    if wrong == "all segments":
        early, last = [*early, last], []
    if wrong == "every layer":
        early = [[layer] for part in early for layer in part]
    if wrong == "late binding":  # functions made in a loop, which all see its last segment
        early = [last] * len(early)
    for part in early:
        x = checkpoint(through, part, x, **{"use_reentrant": False} | settings)
    return through(last, x)


RIGHT = {"06.1": 4, "06.2": 23 / 18, "06.3": keep_last, "06.4": lambda m: 1 - math.sqrt(1 - m)}
WRONG = {
    "06.1": [8, 1, 2, 16, 64, 4.5, 0, math.nan],
    "06.2": [4 / 3, 7 / 6, 11 / 9, 20 / 24, "23/18", 1.25],
    "06.3": [
        *mistakes(keep_last, "plain", "all segments", "every layer", "late binding"),
        partial(keep_last, preserve_rng_state=False), partial(keep_last, use_reentrant=True), 3,
    ],
    "06.4": [
        lambda m: m / 2, lambda m: math.sqrt(1 - m), lambda m: 1 - (1 - m) ** 2, lambda m: m, 0.05,
    ],
}  # fmt: skip

"""Answers to the exercises of notebook 06, right and wrong."""

import math
from functools import partial

from torch.utils.checkpoint import checkpoint


def through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def keep_last(layers, x, segment, **settings):
    for start in range(0, len(layers), segment):
        part = layers[start : start + segment]
        if start + segment < len(layers):
            x = checkpoint(through, part, x, **{"use_reentrant": False} | settings)
        else:
            x = through(part, x)
    return x


def plain(layers, x, segment):
    return through(layers, x)


def all_segments(layers, x, segment):
    for start in range(0, len(layers), segment):
        x = checkpoint(through, layers[start : start + segment], x, use_reentrant=False)
    return x


def every_layer(layers, x, segment):
    last = (len(layers) - 1) // segment * segment
    for layer in layers[:last]:
        x = checkpoint(layer, x, use_reentrant=False)
    return through(layers[last:], x)


def late_binding(layers, x, segment):
    parts = [
        lambda x: through(layers[start : start + segment], x)  # noqa: B023 (this is the mistake)
        for start in range(0, len(layers), segment)
    ]
    for part in parts[:-1]:
        x = checkpoint(part, x, use_reentrant=False)
    return parts[-1](x)


RIGHT = {"06.1": 4, "06.2": 23 / 18, "06.3": keep_last, "06.4": lambda m: 1 - math.sqrt(1 - m)}
WRONG = {
    "06.1": [8, 1, 2, 16, 64, 4.5, 0, math.nan],
    "06.2": [4 / 3, 7 / 6, 11 / 9, 20 / 24, "23/18", 1.25],
    "06.3": [
        plain, all_segments, every_layer, partial(keep_last, preserve_rng_state=False),
        partial(keep_last, use_reentrant=True), late_binding, 3,
    ],
    "06.4": [
        lambda m: m / 2, lambda m: math.sqrt(1 - m), lambda m: 1 - (1 - m) ** 2, lambda m: m, 0.05,
    ],
}  # fmt: skip

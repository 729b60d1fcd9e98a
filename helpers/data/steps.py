"""Which examples are in each micro-batch of each optimizer step of a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from helpers.data import batching
from helpers.recipe import Recipe

# Batches that padding="uniform" sorts together: a larger window pads less and mixes less.
WINDOW = 32


def rows_of_step(
    recipe: Recipe, rows: int, step: int, lengths: Sequence[int] | None = None
) -> list[list[int]]:
    """The indices of the examples in each micro-batch of optimizer step `step` (from 0).

    Depends on its arguments alone. Every epoch is a new permutation of all `rows` examples; its
    last step is smaller when the batch size does not divide their number. padding="uniform" orders
    them by `batching.bucketed` instead, for which it needs their `lengths` in tokens (ValueError
    without).
    """
    epoch, step_of_epoch = divmod(step, math.ceil(rows / recipe.batch_size))
    sizes = recipe.batch_size, recipe.micro_batch
    if recipe.padding != "uniform":
        return _shuffled(rows, *sizes, recipe.seed, epoch)[step_of_epoch]
    if lengths is None:
        raise ValueError(
            "padding='uniform' puts examples of similar length together: give their lengths."
        )
    return _bucketed(tuple(lengths), *sizes, WINDOW, recipe.seed, epoch)[step_of_epoch]


_shuffled = lru_cache(maxsize=4)(batching.shuffled)
_bucketed = lru_cache(maxsize=4)(batching.bucketed)

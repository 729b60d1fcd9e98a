"""In which order a text sweep takes its documents.

To be affordable, the documents are cut to a few tokens, but ordered and batched by their lengths at
`WIDTH` tokens. So an order has the bias and the noise that it has at that length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from helpers import batching, models, train
from helpers.data import Encoded
from helpers.recipe import Recipe, replace
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import learning_rate, train_step

WIDTH = 256
KINDS = ("random", "bucketed", "Trainer", "sorted")


def groups(
    kind: str, lengths: Sequence[int], recipe: Recipe, steps: int | None = None
) -> list[list[int]]:
    """The documents of each step, by their indices.

    random    a new permutation in every epoch
    bucketed  the course's padding="uniform": windows sorted by length, their batches shuffled
    Trainer   transformers' train_sampling_strategy="group_by_length": windows of 50 batches, each
              from long to short, their batches not shuffled
    sorted    the very documents of "random", from short to long

    lengths  tokens per document
    steps    None takes the recipe's
    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"There is no order {kind!r}: choose one of {', '.join(KINDS)}.")
    steps, size = steps or recipe.steps, recipe.batch_size
    if kind == "Trainer":
        generator, order = torch.Generator().manual_seed(recipe.seed), []
        while len(order) < steps * size:
            order += get_length_grouped_indices(list(lengths), size, generator=generator)
        return batching.cut(order[: steps * size], size)
    ruled = replace(recipe, padding="uniform" if kind == "bucketed" else "dynamic")
    batches = [train.rows_of_step(ruled, len(lengths), s, lengths)[0] for s in range(steps)]
    if kind == "sorted":
        documents = sorted((d for batch in batches for d in batch), key=lengths.__getitem__)
        return batching.cut(documents, size)
    return batches


def fit(recipe: Recipe, split: Encoded, order: list[list[int]]) -> train.TrainResult:
    """`train.fit` on the CPU, with the documents of each step as given."""
    model = models.build(recipe)
    optimizer, losses, seconds = make_optimizer(model, recipe), [], []
    torch.manual_seed(recipe.seed)
    for step, documents in enumerate(order):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        batch = split.batch(documents)
        losses.append(train_step(model, optimizer, [batch], len(documents), recipe).item())
        seconds.append(time.perf_counter() - begin)
    return train.TrainResult(recipe, model, losses, seconds, list(map(len, order)), [])

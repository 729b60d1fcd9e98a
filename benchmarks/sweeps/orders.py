"""In which order a text sweep takes its documents, and what a step of each order costs.

To be affordable, the documents are cut to a few tokens, but ordered and batched by their lengths at
`WIDTH` tokens. So an order has the bias and the noise that it has at that length. Its time is
measured at that length as well: `python -m benchmarks.sweeps.orders`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from helpers import batching, models, train
from helpers.data import Encoded
from helpers.recipe import Recipe, replace
from tight_fit.command.wrapper import run
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


def seconds_by_width(widths: Sequence[int], rounds: int = 3) -> dict[int, float]:
    """{padded length: least processor seconds of a step of 16 documents}, taken in turns."""
    recipe = Recipe("deberta", profile="mini", length=WIDTH)
    model = models.build(recipe)
    optimizer = make_optimizer(model, recipe)
    found: dict[int, float] = {}
    for turn in range(rounds + 1):  # the first turn warms up
        for width in widths:
            ids = torch.randint(5, 8000, (16, width))
            batch = {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": ids[:, 0] % recipe.classes,
            }
            begin = time.process_time()
            train_step(model, optimizer, [batch], 16, recipe)
            if turn:
                taken = time.process_time() - begin
                found[width] = min(found.get(width, taken), taken)
    return found


def step_seconds(order: list[list[int]], width_seconds: Callable[[int], float], lengths) -> float:
    """Mean seconds of the steps of an order, from the seconds at each padded length."""
    longest = (max(lengths[document] for document in documents) for documents in order)
    return float(np.mean([width_seconds(batching.padded_length(tokens)) for tokens in longest]))


def main() -> None:
    """Print how many steps of each order fit into the time of 100 random ones at `WIDTH` tokens."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.sweeps.orders",
        description="Measure the step of each order of the examples, and print how they compare.",
    ).parse_args()
    torch.set_num_threads(1)
    recipe = Recipe("deberta", profile="mini", length=WIDTH, padding="dynamic")
    lengths = train.encoded(recipe)["train"].lengths.tolist()
    measured = seconds_by_width([8, 32, 64, 96, 128, 192, 256])
    print({width: round(seconds, 4) for width, seconds in measured.items()})
    epoch = len(lengths) // recipe.batch_size
    means = {
        kind: step_seconds(
            groups(kind, lengths, recipe, epoch),
            lambda width: float(np.interp(width, list(measured), list(measured.values()))),
            lengths,
        )
        for kind in KINDS
    }
    for kind, seconds in means.items():
        steps = 100 * means["random"] / seconds
        print(f"{kind}: {seconds:.3f} s per step, {steps:.0f} steps in the time of 100 random ones")


if __name__ == "__main__":
    raise SystemExit(run(main, "python -m benchmarks.sweeps.orders"))

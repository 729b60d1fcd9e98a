"""One run of a sweep: a fine-tune, its accuracy on validation and on test examples, its time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace as with_
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from benchmarks.sweeps import orders
from benchmarks.sweeps.layerwise import Lamb, Lars
from benchmarks.sweeps.results import Sweep, SweepRun
from benchmarks.sweeps.rounded import RoundedAdamW
from helpers import models, train
from helpers.data import Encoded
from helpers.recipe import Recipe, replace
from helpers.sets import balanced_order, proportional_order
from tight_fit.checks import IGNORE
from tight_fit.techniques import model_changes
from tight_fit.techniques.optimizers import make_optimizer


class Splits(NamedTuple):
    """The examples of a sweep: to train, to choose the learning rate, and to report."""

    train: Encoded
    validation: Encoded
    test: Encoded


def splits(recipe: Recipe, validation: int) -> Splits:
    """The recipe's own training and test examples, and `validation` others of the training split.

    With a `train_size` the recipe trains on what `train.encoded` gives it, and the validation
    examples come from the rest, with its class frequencies. Without, they are taken out of the
    whole training split, with its class frequencies. Raises ValueError where too few are left.
    """
    names = ("model", "profile", "data", "train_size", "test_size", "length", "padding")
    return _splits(Recipe(**{name: getattr(recipe, name) for name in names}), validation)


@lru_cache(maxsize=4)
def _splits(recipe: Recipe, validation: int) -> Splits:
    whole = train.encoded(replace(recipe, train_size=None))
    labels = classes(whole["train"])
    if recipe.train_size is None:
        order = proportional_order(labels).tolist()
        kept, rest = sorted(order[validation:]), order[:validation]
    else:
        order = balanced_order(labels).tolist()
        kept, rest = order[: recipe.train_size], order[recipe.train_size :]
        rest = [rest[i] for i in proportional_order([labels[i] for i in rest])[:validation]]
    if len(rest) < validation or not kept:
        raise ValueError(
            f"{len(labels)} training examples are too few for {recipe.train_size} to train and "
            f"{validation} to choose the learning rate: lower one of them."
        )
    return Splits(subset(whole["train"], kept), subset(whole["train"], rest), whole["test"])


def classes(split: Encoded) -> list[int]:
    """The class of each example; of conversations the first token of the answer."""
    labels = split.columns["labels"]
    if labels.dim() == 2:
        labels = labels.gather(1, (labels != IGNORE).int().argmax(1, keepdim=True))[:, 0]
    return labels.tolist()


def subset(split: Encoded, examples: list[int]) -> Encoded:
    """The examples of these indices, in this order."""
    indices = torch.tensor(examples, dtype=torch.int64)
    columns = {name: values[indices] for name, values in split.columns.items()}
    return with_(split, columns=columns, lengths=split.lengths[indices])


def _full_lengths(recipe: Recipe, validation: int) -> list[int]:
    """Tokens of the training documents before they are cut to the recipe's length."""
    return splits(replace(recipe, length=orders.WIDTH), validation).train.lengths.tolist()


def fit(
    recipe: Recipe, split: Encoded, extra: dict[str, Any], lengths: Sequence[int] = ()
) -> train.TrainResult:
    """The course's loop, with what no field of a recipe names.

    extra    {} for the recipe as it is; "lora": {"targets": names of matrices, "rank": r} puts
             adapters beside those of every layer; "optimizer": "lamb", "lars" or "rounded";
             "order": one of `orders.KINDS`
    lengths  of the documents, by which "order" puts them into batches
    """
    if "order" in extra:
        return orders.fit(recipe, split, orders.groups(extra["order"], lengths, recipe))
    maker = partial(_optimizer, extra=extra) if extra else make_optimizer
    return train.fit(recipe, split, "cpu", progress=False, optimizer=maker)


def _optimizer(
    model: torch.nn.Module, recipe: Recipe, extra: dict[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer of an arm. `train.fit` calls it with the new model, which may change here."""
    if "lora" in extra:  # as helpers.models.prepare does it for the query and value projections
        model_changes.add_lora(model, extra["lora"]["rank"], extra["lora"]["targets"])
        names = {name for name, _ in model.named_parameters() if "lora_" not in name}
        model_changes.freeze(model, {n for n in names if not n.startswith(models.NEW_HEADS)})
    if "optimizer" not in extra:
        return make_optimizer(model, recipe)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = {"lamb": Lamb, "lars": Lars, "rounded": RoundedAdamW}[extra["optimizer"]]
    return kind(trained, lr=recipe.peak_learning_rate, weight_decay=recipe.weight_decay)


def nearest_neighbour(recipe: Recipe, images: int) -> float:
    """Test accuracy of the nearest of so many training images, by the L2 distance of bare pixels.

    The training images are those of a recipe with this `train_size`.
    """
    parts = splits(replace(recipe, train_size=images), 0)
    train_pixels, test_pixels = (
        part.columns["pixel_values"].flatten(1).float() for part in (parts.train, parts.test)
    )
    nearest = torch.cdist(test_pixels, train_pixels).argmin(1)
    guessed = parts.train.columns["labels"][nearest]
    return (guessed == parts.test.columns["labels"]).float().mean().item()


# {name: function of a recipe} of methods that have no learning rate: their test accuracy.
REFERENCES: dict[str, Callable[[Recipe], float]] = {
    f"nearest neighbour of bare pixels, {images} images": partial(nearest_neighbour, images=images)
    for images in (400, 100)
}


def recipe_of(sweep: Sweep, arm: str, rate: float, seed: int, steps: int | None = None) -> Recipe:
    """The recipe of one run. steps: None takes the arm's own."""
    recipe = replace(sweep.base, **sweep.arm(arm).fields, learning_rate=rate, seed=seed)
    return recipe if steps is None else replace(recipe, steps=steps)


def run(sweep: Sweep, arm: str, rate: float, seed: int, steps: int | None = None) -> SweepRun:
    """One fine-tune of an arm on the CPU. steps: None takes the arm's own.

    A run that diverges has no last loss and counts as an accuracy of 0.
    """
    recipe = recipe_of(sweep, arm, rate, seed, steps)
    parts = splits(recipe, sweep.validation)
    lengths = _full_lengths(recipe, sweep.validation) if recipe.task == "text" else []
    begin, begin_cpu = time.perf_counter(), time.process_time()
    try:
        done = fit(recipe, parts.train, sweep.arm(arm).extra, lengths)
    except train.Diverged:
        done = None
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    accuracies, last_loss = [0.0, 0.0], None
    if done:
        accuracies = [train.evaluate(done.model, part, recipe) for part in parts[1:]]
        last_loss = statistics.mean(done.losses[-math.ceil(len(done.losses) / 10) :])
    return SweepRun(
        arm=arm,
        learning_rate=rate,
        seed=seed,
        steps=recipe.steps,
        accuracy=accuracies[1],
        validation=accuracies[0],
        last_loss=last_loss and round(last_loss, 5),
        seconds=round(seconds, 2),
        cpu_seconds=round(cpu_seconds, 2),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )

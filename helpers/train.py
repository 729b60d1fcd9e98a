"""The shared loop: one fine-tune from a recipe, and its accuracy."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from helpers import checkpoint as checkpoints
from helpers import data, models
from helpers.data import Encoded, batching
from helpers.optimizers import make_optimizer, make_scaler
from helpers.recipe import Recipe
from helpers.step import autocast, learning_rate, tensor_cores, train_step

WINDOW = (
    32  # batches that padding="uniform" sorts at a time: a wider window pads less and mixes less
)
LOOK = 10  # steps between looks at the loss: each look waits for the GPU


class Diverged(ArithmeticError):
    """The loss is no number any more."""


@dataclass
class TrainResult:
    """A finished fine-tune.

    losses   mean loss of each optimizer step
    seconds  wall-clock seconds of each step made now (after a resume: without those made before), data included
    skipped  which steps (from 0) changed nothing because a gradient overflowed in fp16; empty in other precisions
    rows     rows of each of those steps
    """

    recipe: Recipe
    model: PreTrainedModel
    losses: list[float]
    seconds: list[float]
    rows: list[int]
    skipped: list[int]


def fit(
    recipe: Recipe,
    train: Encoded | None = None,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
    save_every: int = 20,
    progress: bool = True,
    optimizer: Callable[[torch.nn.Module, Recipe], torch.optim.Optimizer] = make_optimizer,
) -> TrainResult:
    """Fine-tune the recipe's model. The same recipe gives the same losses and weights, bit for bit, on the same CPU.

    train       the encoded training split; None loads the recipe's own
    device      None takes the GPU if there is one
    checkpoint  a folder: the state is saved there every `save_every` steps and at the end, and a call that finds a
                state there goes on from it, to the same weights as if nothing had happened
    optimizer   what makes the optimizer from the model and the recipe, for one that no recipe names
    Raises Diverged (loss is NaN or infinite), torch.OutOfMemoryError (`record.run` says what would fit), ValueError (a
    checkpoint of another recipe), hub.HubUnavailable.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    train = encoded(recipe)["train"] if train is None else train
    with tensor_cores(recipe):
        return _fit(recipe, train, device, checkpoint, save_every, progress, optimizer)


def _fit(recipe, train, device, folder, save_every, progress, make_optimizer) -> TrainResult:
    model = models.build(recipe, device)
    optimizer, scaler = make_optimizer(model, recipe), make_scaler(recipe, device)
    torch.manual_seed(recipe.seed)  # dropout does not depend on how many numbers the new head took
    start, losses, skipped = (
        checkpoints.load(folder, recipe, model, optimizer, scaler) if folder else (0, [], [])
    )
    lengths = train.lengths.tolist() if recipe.padding == "uniform" else None
    clock, rows, unread = Clock(device), [], []
    quiet = (
        not progress or os.environ.get("TQDM_DISABLE") == "1"
    )  # which tqdm's notebook form does not read itself
    bar = tqdm(
        range(start, recipe.steps),
        initial=start,
        total=recipe.steps,
        desc=recipe.model,
        leave=False,
        disable=quiet,
    )
    for step in bar:
        clock.start()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                recipe, step - len(skipped)
            )  # a skipped step is not a step of the schedule
        parts = rows_of_step(recipe, len(train), step, lengths)
        rows.append(sum(map(len, parts)))
        batches = (train.batch(part, device) for part in parts)
        scale = scaler.get_scale()
        unread.append(train_step(model, optimizer, batches, rows[-1], recipe, scaler=scaler))
        if (
            scaler.get_scale() < scale
        ):  # read each step, which a GPU waits for; in other precisions both are 1
            skipped.append(step)
        clock.stop()
        done = step + 1
        saving = folder is not None and (done % save_every == 0 or done == recipe.steps)
        if saving or len(unread) == LOOK or done == recipe.steps:
            losses += _read(unread, len(losses))
            unread.clear()
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if saving:
            checkpoints.save(folder, recipe, done, model, optimizer, losses, scaler, skipped)
    return TrainResult(recipe, model, losses, clock.seconds(), rows, skipped)


def _read(losses: list[torch.Tensor], before: int) -> list[float]:
    values = torch.stack(losses).tolist()
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise Diverged(
                f"The loss is {value} at step {before + index + 1}: lower learning_rate, lengthen warmup, "
                "or use precision='fp32'. The last saved checkpoint, if any, is still good."
            )
    return values


def rows_of_step(
    recipe: Recipe, rows: int, step: int, lengths: Sequence[int] | None = None
) -> list[list[int]]:
    """The row numbers of each micro-batch of one optimizer step: a function of its arguments alone.

    Every epoch is a new permutation of all rows, or their `bucketed` order for padding="uniform", which needs their
    `lengths`; its last group is smaller when the batch size does not divide the rows.
    """
    epoch, place = divmod(step, math.ceil(rows / recipe.batch_size))
    if recipe.padding != "uniform":
        return _shuffled(rows, recipe.batch_size, recipe.micro_batch, recipe.seed, epoch)[place]
    if lengths is None:
        raise ValueError("padding='uniform' puts rows of like length together: give their lengths.")
    return _bucketed(
        tuple(lengths), recipe.batch_size, recipe.micro_batch, WINDOW, recipe.seed, epoch
    )[place]


_shuffled, _bucketed = (
    lru_cache(maxsize=4)(batching.shuffled),
    lru_cache(maxsize=4)(batching.bucketed),
)


@torch.inference_mode()
def evaluate(model: PreTrainedModel, split: Encoded, recipe: Recipe, batch_size: int = 64) -> float:
    """Accuracy on a split, from 0 to 1. The model is left in the mode it was in."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    right = 0
    with tensor_cores(recipe):
        for rows in batching.length_sorted(split.lengths, batch_size):
            batch = split.batch(rows, device)
            labels = batch.pop("labels")
            with autocast(recipe, device):
                right += (model(**batch).logits.argmax(-1) == labels).sum()
    model.train(training)
    return int(right) / len(split)


def encoded(recipe: Recipe) -> dict[str, Encoded]:
    """The recipe's data, ready for its model: {"train": ..., "test": ...}. Kept for the next call."""
    fields = (
        "model",
        "profile",
        "data",
        "train_size",
        "test_size",
        "length",
        "weights",
        "batch_size",
    )
    splits = _encoded(
        Recipe(**{name: getattr(recipe, name) for name in fields})
    )  # the same tokens for every padding
    return {part: replace(split, trim=recipe.padding != "fixed") for part, split in splits.items()}


@lru_cache(maxsize=8)
def _encoded(recipe: Recipe) -> dict[str, Encoded]:
    splits = data.load(recipe.dataset, train_size=recipe.train_size, test_size=recipe.test_size)
    return {
        part: data.encode(splits[part], recipe, models.processor(recipe))
        for part in ("train", "test")
    }


class Clock:
    """Seconds of each step. On CUDA by events, read at the end, so that timing makes nothing wait."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[tuple] = []

    def start(self) -> None:
        self.marks.append((self._now(), None))

    def stop(self) -> None:
        self.marks[-1] = (self.marks[-1][0], self._now())

    def seconds(self) -> list[float]:
        if not self.cuda:
            return [end - begin for begin, end in self.marks]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in self.marks]

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

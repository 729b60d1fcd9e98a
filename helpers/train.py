"""The shared loop: one fine-tune from a recipe, and its accuracy."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from helpers import checkpoint as checkpoints
from helpers import data, models
from helpers.data import Encoded, batching
from helpers.optimizers import make_optimizer, make_scaler
from helpers.recipe import Recipe
from helpers.step import autocast, learning_rate, tensor_cores, train_step

# Batches that padding="uniform" sorts together: a larger window pads less and mixes less.
WINDOW = 32
LOSSES_AT_ONCE = 10  # steps between two reads of the loss: each read waits for the GPU


class Diverged(ArithmeticError):
    """The loss has become infinite or NaN."""


@dataclass
class TrainResult:
    """A finished fine-tune.

    losses   mean loss of each optimizer step
    seconds  wall-clock seconds of each step, data included; after a resume without the steps that
             were made before
    rows     examples of each of those steps
    skipped  the steps (from 0) that changed nothing because a gradient overflowed in fp16; empty in
             other precisions
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
    """Fine-tune the recipe's model. Equal recipes give equal weights, bit for bit, on the same CPU.

    train       the encoded training split; None loads the recipe's own
    device      None takes the GPU if there is one
    checkpoint  a folder: the state is saved there every `save_every` steps and at the end, and a
                call that finds a state there goes on from it, to the same weights as without a stop
    optimizer   makes the optimizer from the model and the recipe, for one that no recipe names
    Raises Diverged (the loss is NaN or infinite), torch.OutOfMemoryError (`record.run` says what
    would fit), ValueError (a checkpoint of another recipe), hub.HubUnavailable.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    train = encoded(recipe)["train"] if train is None else train
    with tensor_cores(recipe):
        return _fit(recipe, train, device, checkpoint, save_every, progress, optimizer)


def _fit(
    recipe: Recipe,
    train: Encoded,
    device: torch.device,
    folder: str | Path | None,
    save_every: int,
    progress: bool,
    make_optimizer: Callable[[torch.nn.Module, Recipe], torch.optim.Optimizer],
) -> TrainResult:
    model = models.build(recipe, device)
    optimizer, scaler = make_optimizer(model, recipe), make_scaler(recipe, device)
    torch.manual_seed(recipe.seed)  # dropout does not depend on how many numbers the new head took
    start, losses, skipped = (
        checkpoints.load(folder, recipe, model, optimizer, scaler) if folder else (0, [], [])
    )
    lengths = train.lengths.tolist() if recipe.padding == "uniform" else None
    starts, ends = [], []
    rows: list[int] = []
    unread: list[torch.Tensor] = []
    bar = _progress_bar(recipe, start, progress)
    for step in bar:
        starts.append(_now(device))
        for group in optimizer.param_groups:  # a skipped step does not advance the schedule
            group["lr"] = learning_rate(recipe, step - len(skipped))
        parts = rows_of_step(recipe, len(train), step, lengths)
        rows.append(sum(map(len, parts)))
        batches = (train.batch(part, device) for part in parts)
        scale = scaler.get_scale()
        unread.append(train_step(model, optimizer, batches, rows[-1], recipe, scaler=scaler))
        # In fp16 this waits for the GPU in each step; in other precisions both scales are 1.
        if scaler.get_scale() < scale:
            skipped.append(step)
        ends.append(_now(device))
        done = step + 1
        last = done == recipe.steps
        saving = folder is not None and (last or done % save_every == 0)
        if last or saving or len(unread) == LOSSES_AT_ONCE:
            losses += _read(unread, len(losses))
            unread.clear()
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if folder and saving:
            checkpoints.save(folder, recipe, done, model, optimizer, losses, scaler, skipped)
    return TrainResult(recipe, model, losses, _seconds(starts, ends), rows, skipped)


def _progress_bar(recipe: Recipe, start: int, progress: bool) -> tqdm:
    hidden = not progress or os.environ.get("TQDM_DISABLE") == "1"  # tqdm.auto ignores it
    return tqdm(
        range(start, recipe.steps),
        initial=start,
        total=recipe.steps,
        desc=recipe.model,
        leave=False,
        disable=hidden,
    )


def _read(losses: list[torch.Tensor], before: int) -> list[float]:
    """The losses as numbers; `before` counts the steps before them. Raises Diverged."""
    values = torch.stack(losses).tolist()
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise Diverged(
                f"The loss is {value} at step {before + index + 1}: lower learning_rate, lengthen "
                "warmup, or use precision='fp32'. The last saved checkpoint, if any, is still good."
            )
    return values


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


@torch.inference_mode()
def evaluate(model: PreTrainedModel, split: Encoded, recipe: Recipe, batch_size: int = 64) -> float:
    """Accuracy on a split, from 0 to 1. The model is left in the mode it was in."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=device)
    with tensor_cores(recipe):
        for rows in batching.length_sorted(split.lengths.tolist(), batch_size):
            batch = split.batch(rows, device)
            labels = batch.pop("labels")
            with autocast(recipe, device):
                correct += (model(**batch).logits.argmax(-1) == labels).sum()
    model.train(training)
    return int(correct) / len(split)


def encoded(recipe: Recipe) -> dict[str, Encoded]:
    """The recipe's encoded data, {"train": ..., "test": ...}. Kept for the next call."""
    # Recipes that agree in these fields share their tokens, whatever their padding.
    names = ("model", "profile", "weights", "data", "train_size", "test_size", "length")
    shared = {name: getattr(recipe, name) for name in (*names, "batch_size")}
    splits = _encoded(Recipe(**shared))
    return {part: replace(split, trim=recipe.padding != "fixed") for part, split in splits.items()}


@lru_cache(maxsize=8)
def _encoded(recipe: Recipe) -> dict[str, Encoded]:
    splits = data.load(recipe.dataset, train_size=recipe.train_size, test_size=recipe.test_size)
    return {
        part: data.encode(splits[part], recipe, models.processor(recipe))
        for part in ("train", "test")
    }


def _now(device: torch.device) -> Any:
    """The time, in seconds; on CUDA an event, which is read at the end, so that nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(starts: list, ends: list) -> list[float]:
    """Between each two times that `_now` gave."""
    if not ends or isinstance(ends[0], float):
        return [end - start for start, end in zip(starts, ends)]
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in zip(starts, ends)]

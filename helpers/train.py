"""The shared loop: one fine-tune from a recipe, and its accuracy."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from helpers import checkpoint as checkpoints
from helpers import data, models
from helpers.batching import WINDOW, length_sorted, rows_of_step
from helpers.chat import right_answers
from helpers.checkpoint import Diverged
from helpers.data import Encoded, batches_of, check_words
from helpers.recipe import Recipe
from tight_fit import gpus
from tight_fit.checks import function, of_type, whole
from tight_fit.techniques.compiled import not_compiled
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import autocast, learning_rate, tensor_cores, train_step

__all__ = ["WINDOW", "Diverged", "TrainResult", "encoded", "evaluate", "fit", "rows_of_step"]

LOSSES_AT_ONCE = 10  # steps between two reads of the loss: each read waits for the GPU


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

    train       the encoded training split, or something of your own with its length, `lengths`
                and `batch`; None loads the recipe's own
    device      None takes the GPU if there is one
    checkpoint  a folder: the state is saved there every `save_every` steps and at the end, and a
                call that finds a state there goes on from it, to the same weights as without a stop
    optimizer   makes the optimizer from the model and the recipe, for one that no recipe names;
                not with a checkpoint, as nobody knows what such an optimizer keeps, and where
    Raises Diverged (the loss or a weight is NaN or infinite), torch.OutOfMemoryError (`record.run`
    says what would fit), ValueError (a checkpoint of another run or a damaged one, a device that is
    not here), OSError (a folder that cannot be written to), TypeError (an optimizer or data of your
    own with a checkpoint), hub.HubUnavailable.
    """
    of_type("recipe", recipe, Recipe)
    whole("save_every", save_every, 1)
    function("optimizer", optimizer)
    place = gpus.device(device)
    if checkpoint is not None and optimizer is not make_optimizer:
        raise TypeError(
            "A checkpoint holds the states of the optimizers that a recipe names: leave checkpoint "
            "out, or save the states of your own optimizer yourself."
        )
    folder = None if checkpoint is None else checkpoints.made(checkpoint)
    train = encoded(recipe)["train"] if train is None else batches_of("train", train)
    if isinstance(train, Encoded):
        train.check_suits(recipe)
    with tensor_cores(recipe):
        return _fit(recipe, train, place, folder, save_every, progress, optimizer)


def _fit(
    recipe: Recipe,
    train: Encoded,
    device: torch.device,
    folder: Path | None,
    save_every: int,
    progress: bool,
    make_optimizer: Callable[[torch.nn.Module, Recipe], torch.optim.Optimizer],
) -> TrainResult:
    model = models.build(recipe, device)
    check_words(train, model)
    optimizer = of_type("optimizer", make_optimizer(model, recipe), torch.optim.Optimizer)
    scaler = make_scaler(recipe, device)
    torch.manual_seed(recipe.seed)  # dropout does not depend on how many numbers the new head took
    state: tuple[int, list[float], list[int]] = 0, [], []
    if folder:
        belongs = checkpoints.owner(recipe, train, device)
        state = checkpoints.load(folder, belongs, model, optimizer, scaler)
    start, losses, skipped = state
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
        labels = sum(map(getattr(train, "counted", len), parts))
        unread.append(train_step(model, optimizer, batches, labels, recipe, scaler=scaler))
        # In fp16 this waits for the GPU in each step; in other precisions both scales are 1.
        if scaler.get_scale() < scale:
            skipped.append(step)
        ends.append(_now(device))
        done = step + 1
        last = done == recipe.steps
        saving = folder is not None and (last or done % save_every == 0)
        if last or saving or len(unread) == LOSSES_AT_ONCE:
            losses += _read(unread, len(losses), folder)
            unread.clear()
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if folder and saving:
            checkpoints.save(folder, belongs, done, model, optimizer, scaler, losses, skipped)
    return TrainResult(recipe, model, losses, _seconds_between(starts, ends), rows, skipped)


def _read(losses: list[torch.Tensor], before: int, folder: Path | None) -> list[float]:
    """The losses as numbers; `before` counts the steps before them. Raises Diverged."""
    values = torch.stack(losses).tolist()
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise Diverged(
                f"The loss is {value} at step {before + index + 1}: {checkpoints.advice(folder)}."
            )
    return values


@torch.inference_mode()
def evaluate(model: PreTrainedModel, split: Encoded, recipe: Recipe, batch_size: int = 64) -> float:
    """Accuracy on a split, from 0 to 1. The model is left in the mode it was in.

    Of a language model: the fraction of answers that it generates right, word for word.
    """
    whole("batch_size", batch_size, 1)
    split.check_suits(recipe)
    device, training = next(model.parameters()).device, model.training
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=device)
    with tensor_cores(recipe), not_compiled(model):
        for rows in length_sorted(split.lengths.tolist(), batch_size):
            batch = split.batch(rows, device)
            with autocast(recipe, device):
                if recipe.task == "chat":
                    correct += right_answers(model, batch).sum()
                    continue
                labels = batch.pop("labels")
                correct += (model(**batch).logits.argmax(-1) == labels).sum()
    model.train(training)
    return int(correct) / len(split)


def encoded(recipe: Recipe) -> dict[str, Encoded]:
    """The recipe's encoded data, {"train": ..., "test": ...}. Kept; each call gets a copy."""
    # Recipes that agree in these fields share their tokens, whatever their padding.
    names = ("model", "profile", "weights", "data", "train_size", "test_size", "length")
    shared = {name: getattr(recipe, name) for name in (*names, "batch_size")}
    splits = _encoded(Recipe(**shared))
    return {part: split.copy(trim=recipe.padding != "fixed") for part, split in splits.items()}


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


def _seconds_between(starts: list, ends: list) -> list[float]:
    """Between each two times that `_now` gave."""
    if not ends or isinstance(ends[0], float):
        return [end - start for start, end in zip(starts, ends)]
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in zip(starts, ends)]


def _progress_bar(recipe: Recipe, start: int, progress: bool) -> tqdm:
    """The steps of a recipe from `start` on, with a bar where `progress` says so."""
    hidden = not progress or os.environ.get("TQDM_DISABLE") == "1"  # tqdm.auto ignores it
    return tqdm(
        range(start, recipe.steps),
        initial=start,
        total=recipe.steps,
        desc=recipe.model,
        leave=False,
        disable=hidden,
    )

"""When the steps of a training loop begin and end, and the bar that shows them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from tqdm.auto import tqdm

from helpers.recipe import Recipe


def now(device: torch.device) -> Any:
    """The time, in seconds; on CUDA an event, which is read at the end, so that nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(starts: list, ends: list) -> list[float]:
    """Between each two times that `now` gave."""
    if not ends or isinstance(ends[0], float):
        return [end - start for start, end in zip(starts, ends)]
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in zip(starts, ends)]


def progress_bar(recipe: Recipe, start: int, progress: bool) -> tqdm:
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

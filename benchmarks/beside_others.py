"""The planner and the training loop beside others, as `python -m benchmarks` prints them.

It prints two tables: the planner's time beside that of a naive plan, and the course's training loop
beside those of other frameworks.

The naive plan is a step of the whole model, run twice (so that the optimizer has its states), under
torch's own `MemTracker`. Planner and naive plan take turns in this process, each time on shapes not
planned before, and are reported by the ratio of their medians.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import torch

from by_hand import frameworks
from helpers import models, train
from helpers.data import Encoded
from helpers.plan import fake_batch, plan
from helpers.recipe import Recipe, replace
from helpers.tables import Table
from tight_fit.techniques.model_changes import as_if_real
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import train_step
from tight_fit.torch_private import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues

FULL = {
    "DeBERTa-v3-base, 16 × 256": Recipe(profile="full", batch_size=16, length=256),
    "ViT-B/16, 32 images": Recipe(profile="full", model="vit", batch_size=32),
    "DeBERTa-v3-large, 16 × 256": Recipe(
        profile="full", model="deberta-large", batch_size=16, length=256
    ),
}
ROUNDS = 3  # of planner and naive plan
LOOPS = {
    "mini DeBERTa, 16 × 64": Recipe(steps=24),
    "mini ViT, 16 images": Recipe(model="vit", steps=80),
    "mini ViT, 4 × 4 images": Recipe(model="vit", steps=40, accumulation=4),
}
TURNS = 11  # of all loops


def naive(recipe: Recipe) -> tuple[int, dict[str, int]]:
    """(peak, {torch's name of a category: its part}) of a step of the whole model, in bytes.

    Measured by `torch.distributed._tools.mem_tracker.MemTracker` on tensors without values.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    with (
        as_if_real(),
        FakeTensorMode(allow_non_fake_inputs=True),
        FakeValues(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        model = models.empty(recipe)
        optimizer = make_optimizer(model, recipe)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                train_step(model, optimizer, [fake_batch(model, recipe)], recipe.batch_size, recipe)
                if step == 0:
                    tracker.reset_mod_stats()
    (peak,) = tracker.get_tracker_snapshot("peak").values()  # of the only device
    parts = {str(kind).split(".")[-1]: size for kind, size in peak.items()}
    return parts.pop("Total"), parts


def times_table() -> Table:
    """Seconds to plan the models at full size, by the planner and by the naive plan."""
    rows = []
    for name, recipe in FULL.items():
        planner_seconds, naive_seconds = [], []
        for turn in range(ROUNDS):  # another batch size each time: nothing is taken from a cache
            changed = replace(recipe, batch_size=recipe.batch_size + turn)
            begin = time.perf_counter()
            planned = plan(changed, "cpu")
            middle = time.perf_counter()
            naive_peak, _ = naive(changed)
            planner_seconds.append(middle - begin)
            naive_seconds.append(time.perf_counter() - middle)
        ratio = statistics.median(naive_seconds) / statistics.median(planner_seconds)
        rows.append(
            {
                "model": name,
                "planner": _spread(planner_seconds),
                "naive": _spread(naive_seconds),
                "ratio": f"{ratio:.1f}",
                "peak, planner": f"{planned.peak:,}",
                "peak, naive": f"{naive_peak:,}",
            }
        )
    return Table(
        rows,
        f"Seconds to plan the whole model, median of {ROUNDS} on {torch.get_num_threads()} threads",
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def _course(recipe: Recipe, data: Encoded) -> object:
    return train.fit(recipe, data, "cpu", progress=False)


FRAMEWORKS: dict[str, Callable[[Recipe, Encoded], object]] = {
    "bare PyTorch": frameworks.plain,
    "the course's": _course,
    "Fabric": frameworks.fabric,
    "Accelerate": frameworks.accelerate,
    "Trainer": frameworks.trainer,
}


def loops_table() -> Table:
    """Whole fine-tunes of the mini models, by the course's loop and by those of other frameworks.

    Making the model is included. Time is the CPU time of this process, which leaves out what other
    processes take from it. Garbage of the turn before is cleared away outside the measured time,
    and freed memory is kept: see `keep_freed_memory`.
    """
    keep_freed_memory()
    rows = []
    for name, recipe in LOOPS.items():
        seconds = _seconds_of_loops(recipe)
        for framework, times in seconds.items():
            ratios = [own / bare for own, bare in zip(times, seconds["bare PyTorch"])]
            median = statistics.median(ratios)
            rows.append(
                {
                    "model": name,
                    "loop": framework,
                    "CPU time per step": f"{statistics.median(times) / recipe.steps * 1000:.2f} ms",
                    "to bare PyTorch": f"{median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                }
            )
    return Table(
        rows,
        f"The same fine-tune by other loops, medians of {TURNS} turns on "
        f"{torch.get_num_threads()} threads, ratios within a turn, freed memory kept",
    )


def _seconds_of_loops(recipe: Recipe) -> dict[str, list[float]]:
    """{framework: CPU seconds of a whole fine-tune, one per turn}."""
    data = train.encoded(recipe)["train"]
    names = list(FRAMEWORKS)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, TURNS):  # the first turn, which imports, does not count
        first = turn % len(names)  # another framework begins each time
        for name in names[first:] + names[:first]:
            gc.collect()
            begin = time.process_time()
            FRAMEWORKS[name](recipe, data)
            if turn >= 0:
                seconds[name].append(time.process_time() - begin)
    return seconds


def keep_freed_memory() -> None:
    """Tell glibc not to give memory back to the system from here on; elsewhere do nothing.

    By default it gives memory back now and then, as the addresses happen to fall. The same loop
    then has between 800 and 4,300 page faults per step: several milliseconds of difference that
    have nothing to do with the framework.
    """
    settings = {-1: 2**31 - 1, -4: 0}  # M_TRIM_THRESHOLD in bytes, M_MMAP_MAX: see mallopt(3)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for which, value in settings.items():
            mallopt(which, value)


def print_tables() -> None:
    """Print all tables."""
    for table in (times_table, loops_table):
        print(table(), "\n", flush=True)

"""`make bench`: the planner against real tensors to the byte, its time beside the naive plan's, what other estimators say,
all of them against real GPUs, and the course's loop beside the others'.

The naive plan is the whole model's step, twice (so that the optimizer has its states), under torch's own `MemTracker`.
Both are timed alternately in this process, each on shapes not planned before, and reported as the ratio of the medians.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import other_estimators, published_peaks
from helpers import frameworks, memory, models, train
from helpers.optimizers import make_optimizer
from helpers.plan.planner import fake_batch, plan
from helpers.recipe import Recipe, replace
from helpers.step import train_step
from helpers.tables import Table

FULL = {
    "DeBERTa-v3-base, 16 × 256": Recipe(profile="full", batch_size=16, length=256),
    "ViT-B/16, 32 images": Recipe(profile="full", model="vit", batch_size=32),
    "DeBERTa-v3-large, 16 × 256": Recipe(
        profile="full", model="deberta-large", batch_size=16, length=256
    ),
}
MINI = {"mini DeBERTa, 16 × 64": Recipe(), "mini ViT, 16 images": Recipe(model="vit")}
CHANGES = (
    {},
    {"accumulation": 4},
    {"precision": "bf16"},
    {"checkpointing": True},
    {"frozen": 2},
    {"precision": "fp16"},
    {"optimizer": "adamw8bit"},
    {"optimizer": "adafactor"},
    {"lora_rank": 8},
    {
        "accumulation": 2,
        "precision": "bf16",
        "checkpointing": True,
        "optimizer": "adamw8bit_embed32",
    },
)
ROUNDS = 3
LOOPS = {
    "mini DeBERTa, 16 × 64": Recipe(steps=24),
    "mini ViT, 16 images": Recipe(model="vit", steps=80),
    "mini ViT, 4 × 4 images": Recipe(model="vit", steps=40, accumulation=4),
}
TURNS = 11


def naive(recipe: Recipe) -> tuple[int, dict[str, int]]:
    """(peak bytes, bytes by torch's own names of the categories) of a step of the whole model, by `MemTracker`."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
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
    seen = {
        str(kind).split(".")[-1]: size
        for kind, size in next(iter(tracker.get_tracker_snapshot("peak").values())).items()
    }
    return seen.pop("Total"), seen


def bytes_table() -> Table:
    """Plan against real tensors of the mini models, a row a change of the recipe."""
    rows = []
    for name, recipe in MINI.items():
        for change in CHANGES:
            changed = replace(recipe, **change)
            planned = plan(changed, "cpu")
            real = memory.measure(changed, train.encoded(changed)["train"]).tracked
            moments = (
                (planned.timeline != real.timeline).any(axis=1).sum()
                if len(planned.timeline) == len(real.timeline)
                else "all"
            )
            rows.append(
                {
                    "model": name,
                    "change": ", ".join(f"{key}={value}" for key, value in change.items())
                    or "none",
                    "planned peak": f"{planned.peak:,}",
                    "real peak": f"{real.peak:,}",
                    "moments": f"{len(real.timeline):,}",
                    "moments that differ": str(moments),
                }
            )
    return Table(rows, "Plan against real tensors, bytes")


def times_table() -> Table:
    rows = []
    for name, recipe in FULL.items():
        ours, theirs = [], []
        for turn in range(ROUNDS):  # another batch size each time: nothing is taken from a cache
            changed = replace(recipe, batch_size=recipe.batch_size + turn)
            begin = time.perf_counter()
            planned = plan(changed, "cpu")
            middle = time.perf_counter()
            peak, _ = naive(changed)
            ours.append(middle - begin)
            theirs.append(time.perf_counter() - middle)
        rows.append(
            {
                "model": name,
                "planner": f"{statistics.median(ours):.2f} s ({min(ours):.2f} to {max(ours):.2f})",
                "naive": f"{statistics.median(theirs):.2f} s ({min(theirs):.2f} to {max(theirs):.2f})",
                "ratio": f"{statistics.median(theirs) / statistics.median(ours):.1f}",
                "peak, planner": f"{planned.peak:,}",
                "peak, naive": f"{peak:,}",
            }
        )
    return Table(
        rows,
        f"Seconds to plan the whole model, median of {ROUNDS} on {torch.get_num_threads()} threads",
    )


def loops_table() -> Table:
    """Whole fine-tunes of the mini models, the model's making included, by the course's loop and by the other ones. By the
    process's own CPU time, which does not count what other processes take from this one. Garbage of the turn before is
    cleared away outside the measured time, and freed memory is kept: see `keep_freed_memory`."""
    keep_freed_memory()
    rows = []
    for name, recipe in LOOPS.items():
        data = train.encoded(recipe)["train"]
        hands = {
            "bare PyTorch": frameworks.plain,
            "the course's": lambda recipe, data: train.fit(recipe, data, "cpu", progress=False),
            "Fabric": frameworks.fabric,
            "Accelerate": frameworks.accelerate,
            "Trainer": frameworks.trainer,
        }
        seconds: dict[str, list[float]] = {hand: [] for hand in hands}
        for turn in range(-1, TURNS):  # the first turn, which imports, does not count
            for hand in [*hands][turn % len(hands) :] + [*hands][
                : turn % len(hands)
            ]:  # another one begins each time
                gc.collect()
                begin = time.process_time()
                hands[hand](recipe, data)
                if turn >= 0:
                    seconds[hand].append(time.process_time() - begin)
        for hand, times in seconds.items():
            ratios = [time / bare for time, bare in zip(times, seconds["bare PyTorch"])]
            rows.append(
                {
                    "model": name,
                    "loop": hand,
                    "CPU time a step": f"{statistics.median(times) / recipe.steps * 1000:.2f} ms",
                    "to bare PyTorch": f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                }
            )
    return Table(
        rows,
        f"The same fine-tune in other hands, medians of {TURNS} turns on {torch.get_num_threads()} "
        "threads, ratios within a turn, freed memory kept",
    )


def keep_freed_memory() -> None:
    """Tell glibc not to give memory back to the system, from here on in this process; elsewhere do nothing.

    By default it does so now and then, as the addresses happen to fall: the same loop then has from 800 to 4,300 page
    faults a step, several milliseconds of difference that have nothing to do with who wrote the loop.
    """
    settings = {-1: 2**31 - 1, -4: 0}  # M_TRIM_THRESHOLD in bytes, M_MMAP_MAX: see mallopt(3)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for which, value in settings.items() if mallopt else ():
        mallopt(which, value)


def main() -> None:
    print(bytes_table(), "\n")
    print(times_table(), "\n")
    print(other_estimators.table(), "\n")
    print(
        "Peaks that others measured on a T4 and an A10, and how far the plan and two estimators are off",
        published_peaks.table(published_peaks.planned()),
        "\n",
        sep="\n",
    )
    print(loops_table())


if __name__ == "__main__":
    main()

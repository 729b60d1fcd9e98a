"""Run by torchrun for `benchmarks.gpu_layouts`: a rank trains on its GPU and measures itself."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist

from benchmarks.measure_step import alone_on_the_gpu, real_batch
from helpers import models
from helpers.measure import MEASURED, WARM_UP, release
from helpers.parallel.layout import Parallel
from helpers.parallel.rank import Rank, grid
from helpers.recipe import Recipe
from helpers.strategy.plan_ranks import ModelShape
from tight_fit.techniques.step import Batch, tensor_cores

TIMED = 10  # steps, and messages, whose median counts
LARGE, SMALL = 2**28, 4  # bytes of the all-reduces that measure the link


def median_seconds(work: Callable[[], object], times: int = TIMED) -> float:
    """By CUDA events, so many times on every rank: each waits for the others."""
    seconds = []
    for _ in range(times):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        work()
        marks[1].record()
        torch.cuda.synchronize()
        seconds.append(marks[0].elapsed_time(marks[1]) / 1000)
    return statistics.median(seconds)


def all_reduce_seconds(size: int) -> float:
    """Of an all-reduce of so many bytes over all ranks."""
    numbers = torch.zeros(size // 4, device="cuda")
    dist.all_reduce(numbers)  # NCCL connects the ranks
    return median_seconds(lambda: dist.all_reduce(numbers))


def meet() -> None:
    """Wait for the other ranks, without a GPU."""
    dist.all_reduce(torch.zeros(1))


def measure(recipe: Recipe, parallel: Parallel) -> dict[str, float]:
    """See `benchmarks.gpu_layouts.measure`."""
    model = models.build(recipe)
    shape = ModelShape(model.config)
    with alone_on_the_gpu() if dist.get_rank() == 0 else nullcontext(), tensor_cores(recipe):
        meet()
        rank = Rank(recipe, parallel, model.to("cuda"), grid(parallel, "cuda"))
        del model  # a stage of a pipeline needs no more of it than its own layers
        release()
        found = _of_steps(rank, shape)
        found |= {"large": all_reduce_seconds(LARGE), "small": all_reduce_seconds(SMALL)}
        del rank
        release()  # the GPUs' memory, before the next step has its turn
        meet()
    return found


def _of_steps(rank: Rank, shape: ModelShape) -> dict[str, float]:
    """Bytes and seconds of this rank's steps."""

    def batch() -> Batch:
        return real_batch(shape, rank.local, "cuda")

    def batches() -> list[Batch]:
        return [batch() for _ in range(rank.local.accumulation)]

    rank.settle(batch)
    for _ in range(WARM_UP):
        rank.step(batches())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(MEASURED):
        rank.step(batches())
    torch.cuda.synchronize()
    found: dict[str, float] = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    ready = batches()  # making them is not a part of the step
    return found | {"seconds": median_seconds(lambda: rank.step(ready))}


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    asked = json.loads(sys.argv[1])
    answer = measure(Recipe.from_dict(asked["recipe"]), Parallel(**asked["parallel"]))
    dist.destroy_process_group()
    print(json.dumps(answer), flush=True)  # last: NCCL may print as well

"""Run by torchrun for `benchmarks.gpu_layouts`: a rank trains on its GPU and measures itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist

from benchmarks.gpu_layouts import LARGE, SMALL, step_of
from benchmarks.measure_step import alone_on_the_gpu, memory_on_a_gpu, seconds_on_a_gpu
from helpers.measure import release
from helpers.recipe import Recipe, replace
from tight_fit.layouts.fake_rank import BatchShape
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.pipeline_rank import PipelineRank
from tight_fit.layouts.rank import ModelRank, grid_of
from tight_fit.models.made import make, prepare
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import batch
from tight_fit.techniques.step import tensor_cores

TIMED = 10  # steps, and messages, whose median counts


def all_reduce_seconds(size: int) -> float:
    """Of an all-reduce of so many bytes over all ranks."""
    numbers = torch.zeros(size // 4, device="cuda")
    dist.all_reduce(numbers)  # NCCL connects the ranks
    return seconds_on_a_gpu(lambda: dist.all_reduce(numbers), TIMED)


def meet() -> None:
    """Wait for the other ranks, without a GPU."""
    dist.all_reduce(torch.zeros(1))


def measure(step: ModelStep, layout: Layout) -> dict[str, float | None]:
    """See `benchmarks.gpu_layouts.measure`."""
    model = prepare(make(step), step)
    shape = BatchShape(model)
    with alone_on_the_gpu() if dist.get_rank() == 0 else nullcontext(), tensor_cores(step):
        meet()
        kind: type[ModelRank | PipelineRank] = PipelineRank if layout.pipeline > 1 else ModelRank
        rank = kind(step, layout, model.to("cuda"), grid_of(layout, "cuda"))
        del model  # a stage of a pipeline needs no more of it than its own layers
        release()
        step_of_rank = _step_of(rank, shape)
        found = memory_on_a_gpu(step_of_rank) | {"seconds": seconds_on_a_gpu(step_of_rank, TIMED)}
        found |= {"large": all_reduce_seconds(LARGE), "small": all_reduce_seconds(SMALL)}
        del step_of_rank
        del rank
        release()  # the GPUs' memory, before the next step has its turn
        meet()
    return found


def _step_of(rank: ModelRank | PipelineRank, shape: BatchShape) -> Callable[[], object]:
    """A step of a rank over a batch that is on its GPU already."""

    def made(step: ModelStep) -> dict[str, torch.Tensor]:
        return {name: value.to("cuda") for name, value in batch(shape, step).items()}

    if isinstance(rank, PipelineRank):
        whole = made(replace(rank.local, accumulation=1))  # of all micro-batches
        return lambda: rank.step(whole)
    micro_batches = [rank.part(made(rank.undivided)) for _ in range(rank.local.accumulation)]
    return lambda: rank.step(micro_batches)


if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    asked = json.loads(sys.argv[1])
    answer = measure(step_of(Recipe.from_dict(asked["recipe"])), parse(asked["layout"]))
    dist.destroy_process_group()
    print(json.dumps(answer), flush=True)  # last: NCCL may print as well

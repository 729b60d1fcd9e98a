"""One rank of many, in one process: no message is sent, and no tensor has values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tight_fit.layouts.layout import Layout
from tight_fit.layouts.pipeline_rank import PipelineRank
from tight_fit.layouts.rank import ModelRank
from tight_fit.layouts.torch_private_ranks import forget_process_groups, fsdp_param_module
from tight_fit.layouts.wrapping import enable_recomputation
from tight_fit.models.made import FlatLogits, empty
from tight_fit.models.step import ModelStep
from tight_fit.techniques.four_bits import count_parameters
from tight_fit.torch_private import fake_store
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_tensors import Indices

Kind = TypeVar("Kind", ModelRank, PipelineRank)


class BatchShape:
    """What `plans.model.batch` asks a model for."""

    def __init__(self, model: FlatLogits):
        self.model = self
        self.config = model.model.config


def fake_rank(
    kind: type[Kind],
    model_step: ModelStep,
    layout: Layout,
    mesh: dict[str, DeviceMesh],
    kernels: Callable[[], CudaKernels],
    selective: bool,
    reduce: str,
) -> tuple[Kind, Any, int]:
    """(this process's rank without values, what a batch depends on, number of parameters).

    Nothing but the rank holds the model afterwards, so that what the rank gives up is freed.
    """
    inside = selective and model_step.compile  # the compiler recomputes: `kept_when_compiled`
    model = empty(replace(model_step, checkpointing=False) if inside else model_step, kernels)
    if selective and not inside:
        enable_recomputation(model.model, True, kernels)
    parameters = count_parameters(model.model)
    shape = BatchShape(model)
    # FSDP2 cuts each parameter into as many chunks as there are ranks and keeps two of them. For
    # 1,024 ranks making all of them takes minutes, so while the parameters are cut, the function of
    # FSDP2's module that does it is replaced by `Chunks`, which makes a chunk when it is asked for.
    with Indices(), patch.object(fsdp_param_module(), "_chunk_with_empty", Chunks):
        return kind(model_step, layout, model, mesh, reduce), shape, parameters


def refuse_a_rank() -> None:
    """Raises RuntimeError where this process has a process group already."""
    if dist.is_initialized():
        raise RuntimeError(
            "This process is a rank already: plan in a process that has no process group."
        )


@contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """Let this process be one rank of many, over torch's process group that sends nothing.

    Raises RuntimeError where there is a process group already.
    """
    refuse_a_rank()
    hook = sys.excepthook  # torch replaces it, to put the rank before every error message
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        forget_process_groups()


class Chunks:
    """The chunks of `torch.chunk(tensor, chunks, dim)`, then empty tensors, each made on demand.

    It stands in for FSDP2's `_chunk_with_empty`, whose callers take two of the chunks by index, and
    with the first rank the same one twice.
    """

    def __init__(self, tensor: torch.Tensor, chunks: int, dim: int):
        self.tensor, self.dim, self.size = tensor, dim, -(-tensor.size(dim) // chunks)
        self.made: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.made:
            self.made[index] = self._make(index)
        return self.made[index]

    def _make(self, index: int) -> torch.Tensor:
        begin = index * self.size
        length = min(self.size, self.tensor.size(self.dim) - begin)
        if length <= 0:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, length)

"""A rank of a layout of any model on tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

from torch.distributed.device_mesh import DeviceMesh

from helpers.language.four_bits import count_parameters
from helpers.parallel.model_layout import Layout
from helpers.parallel.model_rank import ModelRank
from helpers.parallel.model_wrapping import enable_recomputation
from helpers.parallel.pipeline_rank import PipelineRank
from helpers.parallel.torch_private_ranks import fsdp_param_module
from helpers.plan.cuda_kernels import CudaKernels
from helpers.plan.fake_tensors import Indices
from helpers.plan.hf_model import FlatLogits, ModelStep, empty
from helpers.strategy.plan_ranks import Chunks

Kind = TypeVar("Kind", ModelRank, PipelineRank)


class BatchShape:
    """What `hf_plan.batch` asks a model for."""

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
    model = empty(model_step, recompute=kernels)
    if selective:
        enable_recomputation(model.model, True, kernels)
    parameters = count_parameters(model.model)
    shape = BatchShape(model)
    # As in `plan_ranks`: of 1,024 chunks of each parameter only those are made that are asked for.
    with Indices(), patch.object(fsdp_param_module(), "_chunk_with_empty", Chunks):
        return kind(model_step, layout, model, mesh, reduce), shape, parameters

"""The planner of pipelines: each rank's stages, by torch.distributed.pipelining without messages.

torch's own schedules run on tensors without values, over a process group that sends nothing, with
all micro-batches and all layers. Stages differ in what they hold: the first holds most
micro-batches of 1F1B, the last has the head and the logits. So each rank is planned by itself.

Proven byte for byte against real gloo ranks that run torch.distributed.pipelining on small Llamas
and Qwen3s: all four schedules on two ranks, and with DDP and FSDP2 over two data ranks each on
four, by their peaks, messages, FLOPs and weights (tests/layouts/test_plan_pipeline.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tight_fit.kernels.trace_ops import Recorder
from tight_fit.layouts.fake_rank import fake_rank, fake_ranks
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.messages import SentMessage
from tight_fit.layouts.pipeline_rank import PipelineRank
from tight_fit.layouts.rank import grid_of, local_step
from tight_fit.layouts.torch_private_ranks import sent_until_waited_for
from tight_fit.layouts.trace_pipeline import trace_pipeline_rank
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import batch
from tight_fit.trace.cuda_kernels import CudaKernels
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues
from tight_fit.trace.storage_trace import StorageTrace


def trace_stage(
    model_step: ModelStep, layout: Layout, device: str, selective: bool, reduce: str, rank: int
) -> tuple[StorageTrace, int, tuple[SentMessage, ...]]:
    """(trace of the step of the first data rank of one rank of the pipeline, number of the whole
    model's parameters, the messages that the rank sends).

    rank  along the pipeline, from 0
    """

    def kernels() -> CudaKernels:
        return CudaKernels(model_step, active=device == "cuda")

    recorder = Recorder()
    with fake_ranks(layout.ranks, rank * layout.data), sent_until_waited_for():
        mesh = grid_of(layout)  # its tensors have values: before FakeTensorMode
        with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), kernels():
            fake, shape, parameters = fake_rank(
                PipelineRank, model_step, layout, mesh, kernels, selective, reduce
            )
            whole = replace(local_step(model_step, layout), accumulation=1)
            make_batch = partial(batch, shape, whole)
            traced, sent = trace_pipeline_rank(fake, make_batch, recorder, device == "cuda")
            del fake  # its tensors belong to the process group that ends here
    return traced, parameters, sent

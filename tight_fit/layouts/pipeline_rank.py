"""One rank of a pipeline of any decoder: its stages, run by torch.distributed.pipelining.

The same code runs on real ranks, with gloo or NCCL, and without any (`layouts.trace_pipeline`).
Gradients are summed over micro-batches and data ranks: each loss is divided by the labels of the
whole step, as a single process does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from tight_fit.layouts.clipping import clip_
from tight_fit.layouts.ddp import Buckets, with_ddp
from tight_fit.layouts.layout import Layout
from tight_fit.layouts.rank import local_step
from tight_fit.layouts.stages import cut_decoder, like_of_stage
from tight_fit.layouts.torch_private_ranks import lay_out_messages, rebuild_buckets
from tight_fit.layouts.wrapping import apply_fsdp2
from tight_fit.models.made import FlatLogits
from tight_fit.models.step import ModelStep
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import AUTOCAST, Batch, autocast, cross_entropy_sum
from tight_fit.trace.fake_tensors import Indices
from tight_fit.trace.repeated_layers import give_gradients

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


class WatchedStage(PipelineStage):
    """torch's stage, which says when its actions begin and end: `begun("forward" or "backward")`
    and `ended()`."""

    begun: Callable[[str], object] = staticmethod(lambda phase: None)
    ended: Callable[[], object] = staticmethod(lambda: None)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.begun("forward")
        result = super().forward_one_chunk(*args, **kwargs)
        self.ended()
        return result

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if full_backward or not self.is_first:  # else torch does nothing: nobody waits for it
            self.begun("backward")
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.ended()

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.begun("backward")
        super().backward_weight_one_chunk(*args, **kwargs)
        self.ended()


class PipelineRank:
    """One rank's stages and optimizer.

    model_step, layout, model, mesh, reduce  as for `layouts.rank.ModelRank`; the micro-batches are
    the step's `accumulation`
    Raises ValueError where step and layout do not go together.
    """

    def __init__(
        self,
        model_step: ModelStep,
        layout: Layout,
        model: FlatLogits,
        mesh: dict[str, DeviceMesh],
        reduce: str = "fp32",
    ):
        self.model_step, self.layout, self.mesh = model_step, layout, mesh
        self.local = local_step(model_step, layout)
        self.group = mesh["pipeline"].get_group()
        rank, stages = mesh["pipeline"].get_local_rank(), layout.pipeline * layout.chunks
        parts = cut_decoder(model.model, layout, rank, self.local)
        self.first, self.last = 0 in parts, stages - 1 in parts
        self.module = nn.ModuleList(parts.values())
        device = next(self.module.parameters()).device
        self.stages = []
        self.buckets: list[Buckets] = []
        for index, part in parts.items():
            runs: nn.Module = part
            if layout.strategy != "ddp":
                apply_fsdp2(part, layout, mesh["fsdp"], model_step.precision, reduce)
            elif layout.data > 1:
                runs, buckets = with_ddp(
                    part, mesh["data"].get_group(), layout.gradient_as_bucket_view
                )
                self.buckets.append(buckets)
            taken, given = like_of_stage(index, stages, model_step, self.local, layout)
            self.stages.append(
                WatchedStage(runs, index, stages, device, taken, given, group=self.group)
            )
        self.optimizer = make_optimizer(self.module, model_step)
        options: dict[str, Any] = {
            "n_microbatches": self.local.accumulation,
            "loss_fn": self._loss,
            "scale_grads": False,
        }
        single: Any = SINGLE.get(layout.schedule)
        several: Any = SEVERAL.get(layout.schedule)
        self.schedule: Any = (
            single(self.stages[0], **options) if single else several(self.stages, **options)
        )

    @property
    def wrapped(self) -> list[DistributedDataParallel]:
        """The stages under DDP, where there are data ranks that it sums over."""
        runs = [stage.submod for stage in self.stages]
        return [one for one in runs if isinstance(one, DistributedDataParallel)]

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # FSDP2 divides gradients by the ranks; it cannot be told not to with gloo.
        divided = 1 if self.layout.strategy == "ddp" else self.layout.data
        with autocast(self.local, labels.device):
            flat = logits.flatten(0, -2)
            if flat.dtype in AUTOCAST.values():
                flat = flat.float()
            return cross_entropy_sum(flat, labels) / (self.model_step.batch_size / divided)

    def step(
        self,
        batch: Batch,
        begun: Callable[[str], object] = lambda phase: None,
        ended: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """One optimizer step over the batch of this data rank, its micro-batches one after another.

        batch  input_ids int64 [examples, tokens], labels int64 [examples × tokens]
        begun  is called with "forward" or "backward" as an action of the schedule begins, and with
               "optimizer" before the update; `ended` after each action
        Returns the loss of this data rank as `ModelRank.step`, an fp32 scalar; 0 where the last
        stage is on another rank.
        """
        for stage in self.stages:
            stage.begun, stage.ended = begun, ended
        inputs = (batch["input_ids"],) if self.first else ()
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *inputs,
            target=batch["labels"] if self.last else None,
            losses=losses,
            return_outputs=False,
        )
        begun("optimizer")
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
        del losses
        if self.model_step.max_grad_norm is not None:
            clip_(self.module.parameters(), self.model_step.max_grad_norm, others=self.group)
        self.optimizer.step()
        self.module.zero_grad(set_to_none=not self.layout.gradient_as_bucket_view)
        return total / (1 if self.layout.strategy == "ddp" else self.layout.data)

    def settle(self, batch: Batch) -> None:
        """Make all that stays from step to step: optimizer states, DDP's buckets, FSDP2's buffers,
        and those in which torch receives the messages of every micro-batch."""
        ddp = self.wrapped
        if not ddp:
            give_gradients(self.module.parameters())
            self.optimizer.step()
            self.module.zero_grad(set_to_none=True)
        if self.layout.strategy != "ddp" or ddp:
            self._pass(batch)
        if ddp:
            self.optimizer.step()
            with Indices():
                for wrapped in ddp:
                    rebuild_buckets(wrapped)
            self._pass(batch)
        self.module.zero_grad(set_to_none=not self.layout.gradient_as_bucket_view)
        inputs = (batch["input_ids"][: self.local.micro_batch],) if self.first else ()
        labels = batch["labels"] if self.last else None
        lay_out_messages(self.schedule, self.stages, inputs, labels)

    def _pass(self, batch: Batch) -> None:
        """One micro-batch forward and backward through each stage, by itself."""
        for stage in self.stages:
            like, _ = like_of_stage(
                stage.stage_index, stage.num_stages, self.model_step, self.local, self.layout
            )
            given = batch["input_ids"][: self.local.micro_batch]
            if not stage.is_first:
                given = torch.zeros(like.shape, dtype=like.dtype, requires_grad=True)
            result = stage.submod(given)
            result.backward(torch.zeros_like(result))

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Those that receive the messages of every micro-batch, which stay from step to step."""
        infos = [
            info
            for stage in self.stages
            for table in (stage.args_recv_info, stage.grad_recv_info)
            for infos in table.values()
            for info in infos
        ]
        return [info.buffer for info in infos if info.buffer is not None]

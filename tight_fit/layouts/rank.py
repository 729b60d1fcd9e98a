"""One rank of a layout of any Hugging Face model: torch's own engines around it, and its step.

The same code runs on real ranks, with gloo or NCCL, and without any (`layouts.plan.plan_layout`).
Gradients are summed over the ranks and not averaged: each rank divides its loss by the labels of
the whole step, as a single process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from tight_fit.layouts.clipping import clip_
from tight_fit.layouts.context import cut, is_causal, places, split_tokens
from tight_fit.layouts.ddp import Buckets, with_ddp
from tight_fit.layouts.experts import experts_of, split_experts
from tight_fit.layouts.layout import AXES, Layout
from tight_fit.layouts.stages import check_pipeline
from tight_fit.layouts.tensor import split_decoder
from tight_fit.layouts.wrapping import apply_fsdp2, layers, prefetch
from tight_fit.models.made import FlatLogits
from tight_fit.models.step import ModelStep
from tight_fit.techniques import references
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import Batch, loss_sum


def grid_of(layout: Layout, device: str = "cpu") -> dict[str, DeviceMesh]:
    """{axis: the ranks that lie on one line of the grid with this rank}, {"shards": those that hold
    a part of every tensor each}, and {"fsdp": the same with a dimension of replicas where there are
    any}. With expert ranks, which are neighbours among the data ranks, {"expert": those that divide
    the experts} and {"expert_data": those that hold the same ones}.

    Ranks are counted along stages, replicas, data, context and tensor ranks; the last runs fastest.
    Needs a process group; raises ValueError where it has another number of ranks than the layout.
    """
    started = dist.get_world_size()
    if started != layout.ranks:
        raise ValueError(
            f"{layout} needs {layout.ranks} ranks, and {started} were started: start "
            f"{layout.ranks}, or choose a layout of {started}."
        )
    sizes = {name: getattr(layout, name) for name in AXES}
    sizes["data"] //= layout.replicate
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=AXES)
    line = {axis: mesh[axis] for axis in AXES}
    shards = line["data"]
    if layout.context == layout.ranks > 1:
        # The same ranks as those of the context, in a group of its own: other messages are sent.
        shards = DeviceMesh.from_group(dist.new_group(), device, mesh_dim_names=("shards",))
    elif layout.context > 1:
        shards = mesh["data", "context"]._flatten("shards")
    line |= {"shards": shards, "fsdp": shards}
    if layout.replicate > 1:
        line["fsdp"] = mesh["replicate", "data" if layout.context == 1 else "shards"]
    if layout.expert > 1:
        names = ("expert_data", "expert")
        sides = (layout.data // layout.expert, layout.expert)
        of_experts = init_device_mesh(device, sides, mesh_dim_names=names)
        line |= {name: of_experts[name] for name in names}
        if layout.expert == layout.ranks:  # the same ranks as the data ranks: see above
            line["expert"] = DeviceMesh.from_group(
                dist.new_group(), device, mesh_dim_names=names[1:]
            )
    return line


class ModelRank:
    """One rank's model and optimizer.

    model_step  the step of all ranks together: `batch_size` counts the examples of all. With FSDP2
                its precision is the dtype in which weights are gathered and the model computes
                (MixedPrecisionPolicy); with DDP it is autocast. With fp16 the loss is scaled
    layout      how the step is laid over the ranks
    model       what the step asks for, with the same weights on every rank; it is taken over
    mesh        what `grid_of` returns
    reduce      dtype in which FSDP2 sums gradients
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
        self.mesh, self.module = mesh, model
        self.take(model_step, layout)
        self.ddp: DistributedDataParallel | None = None
        self.buckets: Buckets | None = None
        self.context_rank = mesh["context"].get_local_rank()
        self.causal = layout.context > 1 and is_causal(model.model)
        if layout.context > 1:
            split_tokens(model.model, mesh["context"])
        if layout.tensor > 1:
            split_decoder(model.model, mesh["tensor"], self.local.tokens or 1)
        if layout.expert > 1:
            split_experts(model.model, mesh["expert"])
        if layout.strategy != "ddp":
            apply_fsdp2(
                model.model,
                layout,
                mesh["fsdp"],
                model_step.precision,
                reduce,
                mesh.get("expert_data"),
            )
            prefetch(layers(model), layout.prefetch)
        elif layout.data > 1:
            self.ddp, self.buckets = with_ddp(
                model, mesh["data"].get_group(), layout.gradient_as_bucket_view
            )
        self.model = model if self.ddp is None else self.ddp
        self.scaler = make_scaler(model_step, next(model.parameters()).device)
        self.optimizer = make_optimizer(model, model_step)
        if layout.expert > 1:
            self._update_experts_apart()

    def take(self, model_step: ModelStep, layout: Layout) -> None:
        """Let this rank's steps be those of another `ModelStep`, which differs in micro-batches and
        recomputation; the latter is the model's. Raises ValueError as `local_step`."""
        self.model_step, self.layout = model_step, layout
        self.local = local_step(model_step, layout)
        self.undivided = replace(self.local, length=model_step.length)

    @property
    def divided(self) -> int:
        """By how many ranks FSDP2 divides gradients; with expert ranks it does not."""
        if self.layout.strategy == "ddp" or self.layout.expert > 1:
            return 1
        return self.layout.data * self.layout.context

    @property
    def of_experts(self) -> list[torch.nn.Parameter]:
        """The weights of which expert ranks hold some experts each."""
        if self.layout.expert == 1:
            return []
        return [weight for experts in experts_of(self.module) for weight in experts.parameters()]

    def _update_experts_apart(self) -> None:
        """Let the optimizer update experts by a kernel of their own: one kernel takes no weights
        that are divided over unlike many ranks."""
        (whole,) = self.optimizer.param_groups
        apart = set(self.of_experts)
        settings = {name: value for name, value in whole.items() if name != "params"}
        experts = [weight for weight in whole["params"] if weight in apart]
        whole["params"] = [weight for weight in whole["params"] if weight not in apart]
        self.optimizer.add_param_group(settings | {"params": experts})

    def part(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch of its data rank, which context ranks divide by tokens.

        batch  as `plans.model.batch` makes it for `self.undivided`
        Raises ValueError for padding among context ranks, and for attention of both kinds.
        """
        ranks, tokens = self.layout.context, self.model_step.tokens
        if ranks == 1 or tokens is None:
            return batch
        return cut(batch, places(self.context_rank, ranks, tokens, self.causal), tokens)

    def step(
        self,
        batches: Iterable[Batch],
        phase: Callable[[str], None] = lambda name: None,
        count: int | None = None,
    ) -> torch.Tensor:
        """One optimizer step over this rank's micro-batches, as
        `tight_fit.techniques.step.train_step`.

        phase  is called with "forward", "backward" and "optimizer" as they begin
        count  number of micro-batches; None: the step's `accumulation`
        Returns this rank's part of the loss, summed over labels and divided by the examples of the
        step, an fp32 scalar; summed over the data ranks it is the loss.
        """
        total: torch.Tensor | float = 0.0
        last = (count or self.local.accumulation) - 1
        examples = self.model_step.batch_size
        for number, batch in enumerate(batches):
            phase("forward")
            with self._sending(number == last), self._loss():
                loss = loss_sum(self.model, batch, self.local) / (examples / self.divided)
                phase("backward")
                self.scaler.scale(loss).backward()
            total = total + loss.detach()
            del loss
        phase("optimizer")
        self.scaler.unscale_(self.optimizer)
        if self.model_step.max_grad_norm is not None:
            group = self.mesh["expert"].get_group() if self.of_experts else None
            clip_(
                self.module.parameters(),
                self.model_step.max_grad_norm,
                experts=self.of_experts,
                expert_ranks=group,
            )
        # Whether a gradient overflowed is the same on all ranks: of parts DTensor asks each.
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Gradients that are views of DDP's buckets stay with them.
        self.module.zero_grad(set_to_none=not self.layout.gradient_as_bucket_view)
        assert isinstance(total, torch.Tensor), "a step needs at least one micro-batch"
        return total / self.divided

    def _loss(self) -> AbstractContextManager[Any]:
        """Inside, the loss is taken of logits whose vocabulary tensor ranks divide."""
        return loss_parallel() if self.layout.tensor > 1 else nullcontext()

    def _sending(self, last: bool) -> AbstractContextManager[Any]:
        """Whether gradients are sent after this micro-batch."""
        if self.ddp is not None and not last:
            return self.ddp.no_sync()
        if self.layout.strategy == "zero1":
            wrapped: Any = self.module.model  # an FSDPModule
            wrapped.set_requires_gradient_sync(last)
        return nullcontext()


def local_step(model_step: ModelStep, layout: Layout) -> ModelStep:
    """The step as one data rank sees it: with its part of the examples, and without autocast where
    FSDP2 casts.

    Raises ValueError where step and layout do not go together.
    """
    least = layout.data * model_step.accumulation
    if model_step.batch_size % least:
        raise ValueError(
            f"batch_size={model_step.batch_size} cannot be divided evenly by {layout.data} data "
            f"ranks with accumulation={model_step.accumulation}: use a multiple of {least}."
        )
    if layout.pipeline > 1:
        check_pipeline(model_step, layout)
    if model_step.task in references.TASKS or model_step.reads == "images":
        raise ValueError(
            f"task={model_step.task!r} is planned on one GPU, and not with a layout: leave the "
            "layout out, or plan task='causal-lm'."
        )
    changes: dict[str, Any] = {"batch_size": model_step.batch_size // layout.data}
    if model_step.compile and layout.ranks != layout.data:
        raise ValueError(
            "compile=True is planned with data ranks only: leave it out, and the plan is that of "
            "the step without torch.compile."
        )
    if model_step.float8 and not (model_step.compile and layout.strategy != "ddp"):
        raise ValueError(
            f"float8={model_step.float8!r} is planned on several GPUs with FSDP2 and compile=True "
            "only: add compile, or leave float8 out."
        )
    for name in ("offload", "optimizer_in_backward"):
        if getattr(model_step, name):
            raise ValueError(
                f"{name}={getattr(model_step, name)!r} is planned for one GPU, and not with a "
                "layout: leave it out."
            )
    if model_step.loss == "chunked" and layout.tensor > 1:
        raise ValueError(
            "loss='chunked' is not planned with tensor ranks, each of which has logits of its own "
            "words only: use loss='full'."
        )
    if layout.context > 1 and model_step.attention not in (None, "sdpa"):
        raise ValueError(
            f"attention={model_step.attention!r} is not planned with context ranks: leave it out."
        )
    if model_step.precision == "fp16" and max(layout.pipeline, layout.expert) > 1:
        raise ValueError(
            "precision='fp16' skips steps whose gradients overflow, and stages or expert ranks "
            "would have to agree: use bf16 or fp32 with pipeline and expert."
        )
    if layout.strategy != "ddp":
        if model_step.optimizer != "adamw":
            raise ValueError(
                f"optimizer={model_step.optimizer!r} does not work on parts of tensors: use "
                "optimizer='adamw', or strategy='ddp'."
            )
        _check_adapters(model_step, layout)
        changes["precision"] = "tf32" if model_step.precision == "tf32" else "fp32"
    if layout.context > 1:
        changes["length"] = _tokens_of_rank(model_step, layout)
    return replace(model_step, **changes)


def _check_adapters(model_step: ModelStep, layout: Layout) -> None:
    """Raises ValueError for adapters and frozen weights that FSDP2 cannot divide, or the others."""
    for name in ("lora_rank", "frozen"):
        for axis in ("tensor", "context", "expert"):
            if getattr(model_step, name) is not None and getattr(layout, axis) > 1:
                raise ValueError(
                    f"{name}={getattr(model_step, name)} is planned with data ranks only: leave "
                    f"{axis} out."
                )


def _tokens_of_rank(model_step: ModelStep, layout: Layout) -> int:
    """Tokens of each example that a context rank holds. Raises ValueError."""
    if model_step.tokens is None or model_step.reads != "text":
        raise ValueError("context divides the tokens of a text: leave it out with this model.")
    if model_step.kind.each != "token":
        raise ValueError(
            f"context divides the tokens of a text, and the task {model_step.task} has one answer "
            "for all of them: leave it out, or name a task such as causal-lm."
        )
    if model_step.tokens % (2 * layout.context):
        raise ValueError(
            f"length={model_step.tokens} cannot be divided over context={layout.context} ranks, "
            f"each of which takes two parts: use a multiple of {2 * layout.context}."
        )
    return model_step.tokens // layout.context

"""One rank of a layout: the course's training step, its model wrapped by torch's own engines.

The same code runs on real ranks, with gloo or NCCL, and without any: `helpers.strategy.plan_ranks`
gives it tensors without values and a process group that sends nothing. Gradients are summed over
the ranks and not averaged: each rank divides its loss by the examples of the whole step, as a
single process does.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from by_hand.pipeline import run
from by_hand.pipeline_stage import SHARED, Stage, cut
from by_hand.transport import PipelineTransport
from helpers.parallel.layout import Parallel
from helpers.parallel.tensor_dtensor import regroup, split
from helpers.recipe import Recipe
from tight_fit.layouts.clipping import clip_, local
from tight_fit.layouts.ddp import with_ddp
from tight_fit.layouts.schedules import gpipe, one_f_one_b
from tight_fit.layouts.torch_private_ranks import rebuild_buckets
from tight_fit.techniques.optimizers import make_optimizer, make_scaler
from tight_fit.techniques.step import Batch, loss_sum
from tight_fit.trace.fake_tensors import Indices

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
AXES = ("pipeline", "data", "tensor")  # of the grid; tensor ranks are neighbours in number


def grid(parallel: Parallel, device: str = "cpu") -> dict[str, DeviceMesh]:
    """{axis: the ranks that lie on one line of the grid with this rank}, for each of `AXES`.

    Ranks are counted along the pipeline, data and tensor axes; the last one runs fastest. Needs a
    process group; raises ValueError where it has another number of ranks than the layout.
    """
    started = dist.get_world_size()
    if started != parallel.ranks:
        raise ValueError(
            f"{parallel} needs {parallel.ranks} ranks, and {started} were started: start "
            f"{parallel.ranks}, or choose a layout of {started}."
        )
    shape = tuple(getattr(parallel, axis) for axis in AXES)
    mesh = init_device_mesh(device, shape, mesh_dim_names=AXES)
    return {axis: mesh[axis] for axis in AXES}


class Rank:
    """One rank's model and optimizer.

    recipe    the step of all ranks together: `batch_size` counts the examples of all
    parallel  how the step is laid over the ranks
    model     what the recipe asks for, with the same weights on every rank; it is taken over
    mesh      what `grid` returns
    scaler    fp16's loss scaler; None makes the recipe's own
    Raises ValueError where recipe and layout do not go together.
    """

    def __init__(
        self,
        recipe: Recipe,
        parallel: Parallel,
        model: nn.Module,
        mesh: dict[str, DeviceMesh],
        scaler: torch.amp.GradScaler | None = None,
    ):
        self.recipe, self.parallel, self.mesh = recipe, parallel, mesh
        self.scaler = scaler or make_scaler(recipe, next(model.parameters()).device)
        self.local = parallel.local(recipe)
        if parallel.tensor > 1:
            split(model, mesh["tensor"], vocabulary=recipe.task == "text")
        if parallel.pipeline > 1:
            self.transport = PipelineTransport(mesh["pipeline"].get_group())
            self.schedule = SCHEDULES[parallel.schedule](parallel.pipeline, self.local.accumulation)
            self.stage: Stage = cut(model, parallel.pipeline)[self.transport.rank]
            model = self.stage
        self.module = model
        self.ddp: DistributedDataParallel | None = None
        if parallel.zero_stage >= 2:
            apply_fsdp(model, mesh["data"], parallel.zero_stage == 3)
        elif parallel.data > 1 and parallel.pipeline == parallel.tensor == 1:
            # Only here: DDP knows neither stages nor split tensors.
            self.ddp, _ = with_ddp(model, mesh["data"].get_group(), views=True)
        self.model = model if self.ddp is None else self.ddp
        self.optimizer, self.slices = optimizer_of(self.module, recipe, parallel, mesh)

    def step(
        self,
        batches: Iterable[Batch],
        phase: Callable[[str], None] = lambda name: None,
        count: int | None = None,
        examples: int | None = None,
    ) -> torch.Tensor:
        """One optimizer step over this rank's micro-batches, as
        `tight_fit.techniques.step.train_step`.

        phase     is called with "forward", "backward" and "optimizer" as they begin
        count     number of micro-batches; None: the recipe's `accumulation`
        examples  of the step over all ranks; None: the recipe's `batch_size`. The last step of an
                  epoch may have fewer
        Returns this rank's part of the mean loss, an fp32 scalar; summed over the data ranks, and
        in a pipeline over its stages, it is the loss.
        """
        examples = examples or self.recipe.batch_size
        if self.parallel.pipeline > 1:
            return self._pipeline_step(list(batches), phase, examples)
        total: torch.Tensor | float = 0.0
        last = (count or self.local.accumulation) - 1
        # FSDP2 divides gradients by the number of ranks, and with gloo it cannot be told not to.
        divided = self.parallel.data if self.parallel.zero_stage >= 2 else 1
        for number, batch in enumerate(batches):
            phase("forward")
            with self.ddp.no_sync() if self.ddp and number != last else nullcontext():
                loss = loss_sum(self.model, batch, self.local) / (examples / divided)
                phase("backward")
                self.scaler.scale(loss).backward()
            total = total + loss.detach()
        phase("optimizer")
        self._sum_over_data()
        self.scaler.unscale_(self.optimizer)
        clip_(self.module.parameters(), self.recipe.max_grad_norm or math.inf)
        self._update()
        assert isinstance(total, torch.Tensor), "a step needs at least one micro-batch"
        return total / divided if divided > 1 else total

    def settle(self, make_batch: Callable[[], Batch]) -> None:
        """Take the steps after which no step makes anything that stays.

        First steps make the optimizer states, DDP's buckets (laid anew after the first step), the
        buffers of FSDP2's gathered parameters, and what DTensor works out about each operation.
        `make_batch()` returns a micro-batch.
        """
        if not self.ddp and self.parallel.zero_stage < 2 and self.parallel.tensor == 1:
            for parameter in self.module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            self._update()
            return
        count = self.local.accumulation
        if self.parallel.pipeline == 1:
            # With DTensor, adding to a gradient is an operation of its own: it needs a second one.
            count = min(count, 2) if self.parallel.tensor > 1 else 1
        self.step([make_batch() for _ in range(count)], count=count)
        if self.ddp:
            with Indices():
                rebuild_buckets(self.ddp)
            self.step([make_batch() for _ in range(count)], count=count)

    def _pipeline_step(
        self, batches: list[Batch], phase: Callable[[str], None], examples: int
    ) -> torch.Tensor:
        if not self.stage.first and self.recipe.task == "image":  # only the first reads the images
            batches = [{"labels": batch["labels"]} for batch in batches]
        done = run(
            self.schedule,
            [self.stage],
            self.transport,
            batches,
            examples,
            self.recipe,
            phase=phase,
        )
        phase("optimizer")
        self._sum_over_data()
        counted = [
            parameter
            for name, parameter in self.module.named_parameters()
            if self.stage.first or not name.startswith(SHARED)
        ]
        stages = self.mesh["pipeline"].get_group()
        clip_(self.module.parameters(), self.recipe.max_grad_norm or math.inf, counted, stages)
        self._update()
        return sum(done.losses, torch.zeros(()))

    def _sum_over_data(self) -> None:
        """What DDP and FSDP2 do during the backward pass, where neither is used."""
        if self.parallel.data == 1 or self.parallel.zero_stage >= 2 or self.ddp:
            return
        gradients = [
            parameter.grad for parameter in self.module.parameters() if parameter.grad is not None
        ]
        pending = [
            dist.all_reduce(local(gradient), group=self.mesh["data"].get_group(), async_op=True)
            for gradient in gradients
        ]
        for work in pending:
            work.wait()

    def _update(self) -> None:
        for parameter, part in self.slices:
            assert parameter.grad is not None  # after a backward pass
            part.grad = local(parameter.grad)
        self.scaler.step(self.optimizer)  # every rank has the same sum: all skip a step, or none
        self.scaler.update()
        for _, part in self.slices:
            part.grad = None
        # DDP's buckets stay allocated, and so do the gradients, which are views of them: set to
        # None, they would be made a second time, beside the buckets, when micro-batches accumulate.
        self.module.zero_grad(set_to_none=self.ddp is None)


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
    """Apply FSDP2 in place: each transformer layer is a group, the rest (embeddings, head) another.

    reshard  drop a layer's gathered parameters after its forward pass and gather them again for the
             backward pass (ZeRO-3); False keeps them
    """
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers of a course model, in order."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def optimizer_of(
    model: nn.Module, recipe: Recipe, parallel: Parallel, mesh: dict[str, DeviceMesh]
) -> tuple[torch.optim.Optimizer, list[tuple[torch.Tensor, nn.Parameter]]]:
    """The recipe's optimizer over this rank's parameters, and the pairs (split parameter, slice).

    With `zero_stage=1` each data rank keeps the states of some whole parameters.
    ZeroRedundancyOptimizer does not know DTensors, so it is given this rank's slices of them; the
    pairs say which gradient belongs to which slice. Otherwise there are no pairs.
    """
    optimizer = make_optimizer(model, recipe)
    if parallel.zero_stage != 1:
        return (regroup(optimizer) if parallel.tensor > 1 else optimizer), []
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs: list[tuple[torch.Tensor, nn.Parameter]] = [
        (parameter, nn.Parameter(local(parameter).detach()))
        for parameter in trained
        if isinstance(parameter, DTensor)
    ]
    slices = {id(parameter): part for parameter, part in pairs}
    settings = {
        name: value
        for name, value in optimizer.defaults.items()
        if name != "decoupled_weight_decay"
    }
    sharded = ZeroRedundancyOptimizer(
        [slices.get(id(parameter), parameter) for parameter in trained],
        optimizer_class=type(optimizer),
        process_group=mesh["data"].get_group(),
        **settings,
    )
    return sharded, pairs

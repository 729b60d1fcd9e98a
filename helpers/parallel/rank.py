"""One rank of a layout: the course's step, its model wrapped by torch's own engines.

The same code runs on real ranks (gloo, NCCL) and on none (`planned`: tensors without values, a process group that
sends nothing). Gradients are summed over the ranks, not averaged: each rank divides its loss by the rows of the whole
step already, as in a single process.
"""

import inspect
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

from helpers.optimizers import make_optimizer, make_scaler
from helpers.parallel.layout import Parallel
from helpers.parallel.pipeline import run
from helpers.parallel.pipeline_stage import SHARED, cut
from helpers.parallel.schedules import gpipe, one_f_one_b
from helpers.parallel.tensor_dtensor import clip_, local, regroup, split
from helpers.parallel.transport import ProcessGroupTransport
from helpers.plan.fake_tensors import Indices
from helpers.recipe import Recipe
from helpers.step import Batch, loss_sum
from helpers.torch_private import rebuild_buckets

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
# The models' buffers never change: nothing to send. torch 2.13 has renamed the switch.
_SWITCHES = inspect.signature(DistributedDataParallel).parameters
STILL_BUFFERS = {
    "forward_sync_buffers" if "forward_sync_buffers" in _SWITCHES else "broadcast_buffers": False
}
AXES = (
    "pipeline",
    "data",
    "tensor",
)  # of the grid; neighbours in the last one are neighbours in rank


def grid(parallel: Parallel, device: str = "cpu") -> dict[str, DeviceMesh]:
    """This rank's line of ranks along each axis of the grid, tensor ranks next to each other. The process group must be
    there; raises ValueError where it has another number of ranks."""
    if dist.get_world_size() != parallel.ranks:
        raise ValueError(
            f"{parallel} needs {parallel.ranks} ranks, and {dist.get_world_size()} were started."
        )
    mesh = init_device_mesh(
        device, tuple(getattr(parallel, axis) for axis in AXES), mesh_dim_names=AXES
    )
    return {axis: mesh[axis] for axis in AXES}


class Rank:
    """One rank's model and optimizer. `model` is what the recipe asks for, the same on every rank; it is taken over.

    recipe  the step of the whole: `batch_size` counts the rows of all ranks
    scaler  fp16's loss scaler; None makes the recipe's own
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
            self.transport = ProcessGroupTransport(mesh["pipeline"].get_group())
            self.schedule = SCHEDULES[parallel.schedule](parallel.pipeline, self.local.accumulation)
            model = cut(model, parallel.pipeline)[self.transport.rank]
        self.module = model
        if parallel.zero_stage >= 2:
            apply_fsdp(model, mesh["data"], parallel.zero_stage == 3)
        elif (
            parallel.data > 1 and parallel.pipeline == parallel.tensor == 1
        ):  # DDP knows neither stages nor split tensors
            model = DistributedDataParallel(
                model,
                process_group=mesh["data"].get_group(),
                gradient_as_bucket_view=True,
                init_sync=False,
                **STILL_BUFFERS,
            )
            model.register_comm_hook(mesh["data"].get_group(), add_up)
        self.model = model
        self.optimizer, self.slices = optimizer_of(self.module, recipe, parallel, mesh)

    def step(
        self,
        batches: Iterable[Batch],
        phase: Callable[[str], None] = lambda name: None,
        count: int | None = None,
        rows: int | None = None,
    ) -> torch.Tensor:
        """One optimizer step over this rank's micro-batches (`count` of them, `accumulation` by default), as
        `helpers.step.train_step`. Returns this rank's part of the mean loss: the sum over the data ranks is the loss.

        rows  of the step over all ranks, where the last of an epoch has fewer than `batch_size`
        """
        rows = rows or self.recipe.batch_size
        if self.parallel.pipeline > 1:
            return self._pipeline_step(list(batches), phase, rows)
        total, count = 0.0, count or self.local.accumulation
        mean = (
            self.parallel.data if self.parallel.zero_stage >= 2 else 1
        )  # FSDP2 divides by the ranks; gloo can do no other
        for number, batch in enumerate(batches):
            phase("forward")
            last = number == count - 1
            with (
                nullcontext()
                if last or not isinstance(self.model, DistributedDataParallel)
                else self.model.no_sync()
            ):
                loss = loss_sum(self.model, batch, self.local) / (rows / mean)
                phase("backward")
                self.scaler.scale(loss).backward()
            total = total + loss.detach()
        phase("optimizer")
        self._sum_over_data()
        self.scaler.unscale_(self.optimizer)
        clip_(self.module.parameters(), self.recipe.max_grad_norm)
        self._update()
        return total / mean if mean > 1 else total

    def settle(self, make_batch: Callable[[], Batch]) -> None:
        """Take the steps after which nothing new is made once for all: optimizer states, DDP's buckets (laid anew after its
        first step), the places for FSDP2's gathered parameters, what DTensor works out about each operation.
        `make_batch()` gives a micro-batch."""
        ddp = isinstance(self.model, DistributedDataParallel)
        if not ddp and self.parallel.zero_stage < 2 and self.parallel.tensor == 1:
            for parameter in self.module.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            self._update()
            return
        count = self.local.accumulation
        if self.parallel.pipeline == 1:
            count = (
                min(count, 2) if self.parallel.tensor > 1 else 1
            )  # adding to a gradient is an operation of its own
        for number in range(2 if ddp else 1):
            if number == 1:
                with Indices():
                    rebuild_buckets(self.model)
            self.step([make_batch() for _ in range(count)], count=count)

    def _pipeline_step(
        self, batches: list[Batch], phase: Callable[[str], None], rows: int
    ) -> torch.Tensor:
        if (
            not self.module.first and self.recipe.task == "image"
        ):  # the others do without the pictures
            batches = [{"labels": batch["labels"]} for batch in batches]
        done = run(
            self.schedule, [self.module], self.transport, batches, rows, self.recipe, phase=phase
        )
        phase("optimizer")
        self._sum_over_data()
        own = [
            parameter
            for name, parameter in self.module.named_parameters()
            if self.module.first or not name.startswith(SHARED)
        ]
        clip_(
            self.module.parameters(),
            self.recipe.max_grad_norm,
            own,
            self.mesh["pipeline"].get_group(),
        )
        self._update()
        return sum(done.losses, torch.zeros(()))

    def _sum_over_data(self) -> None:
        """What DDP and FSDP2 do during the backward pass, where neither is used."""
        if (
            self.parallel.data == 1
            or self.parallel.zero_stage >= 2
            or isinstance(self.model, DistributedDataParallel)
        ):
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
            part.grad = parameter.grad.to_local()
        self.scaler.step(self.optimizer)  # every rank has the same sum, so all skip a step or none
        self.scaler.update()
        for _, part in self.slices:
            part.grad = None
        # DDP's buckets stay, and gradients that stay are views of them: else accumulation would make others beside them.
        self.module.zero_grad(set_to_none=not isinstance(self.model, DistributedDataParallel))


def add_up(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the sum over the ranks, where DDP by itself takes the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: bucket.buffer())


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
    """FSDP2, in place: each transformer layer is a group of its own, the rest (embeddings, head) one more.

    reshard  drop a layer's gathered parameters after its forward pass and gather them again for the backward (ZeRO-3)
    """
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers of a course model, in order."""
    return list(
        max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)
    )


def optimizer_of(model: nn.Module, recipe: Recipe, parallel: Parallel, mesh: dict[str, DeviceMesh]):
    """(the recipe's optimizer over this rank's parameters, pairs of split parameters and what stands for them there).

    With zero_stage=1 each data rank keeps the states of some whole parameters; ZeroRedundancyOptimizer does not know split
    ones, so it is given this rank's slices of them.
    """
    optimizer = make_optimizer(model, recipe)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if parallel.zero_stage == 1:
        pairs = [
            (parameter, nn.Parameter(parameter.to_local().detach()))
            for parameter in trained
            if isinstance(parameter, DTensor)
        ]
        slices = {id(parameter): part for parameter, part in pairs}
        settings = {
            name: value
            for name, value in optimizer.defaults.items()
            if name != "decoupled_weight_decay"
        }
        return ZeroRedundancyOptimizer(
            [slices.get(id(parameter), parameter) for parameter in trained],
            optimizer_class=type(optimizer),
            process_group=mesh["data"].get_group(),
            **settings,
        ), pairs
    return regroup(optimizer) if parallel.tensor > 1 else optimizer, []

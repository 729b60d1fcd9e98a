"""Run by tests/by_hand/test_zero.py as ranks: engines that shard states, against one process."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from by_hand import frameworks
from helpers import models, train
from helpers.recipe import Recipe
from tests.by_hand.test_frameworks import still_models
from tests.ranks.tiny import difference, whole
from tight_fit.techniques.optimizers import make_optimizer
from tight_fit.techniques.step import loss_sum


def ddp_zero(model, recipe):
    usual = make_optimizer(model, recipe).defaults
    settings = {name: usual[name] for name in ("lr", "weight_decay", "fused")}
    settings["optimizer_class"] = torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **settings)
    return DistributedDataParallel(model), optimizer


def plain(model, recipe):
    return model, make_optimizer(model, recipe)


def fsdp(model, recipe, reshard, **settings):
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    layers = next(part for part in lists if len(part) == recipe.layers)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, **settings)
    return model, make_optimizer(model, recipe)


ON_THE_HOST = CPUOffloadPolicy(pin_memory=False)
ENGINES = {
    "zero-1": ddp_zero,
    "fsdp, kept": lambda *both: fsdp(*both, False),
    "fsdp": lambda *both: fsdp(*both, True),
    "fsdp, offload": lambda *both: fsdp(*both, True, offload_policy=ON_THE_HOST),
}


class Traffic(TorchDispatchMode):
    """Bytes of the collectives by name."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function.overloadpacket.__name__.strip("_")
            most = max(
                sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor))
                for arg in args
            )
            self.bytes[name] = self.bytes.get(name, 0) + most
        return function(*args, **(kwargs or {}))


def held(tensors):
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local if tensor.dim()]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def tune(make, recipe, data, ranks=1, rank=0):
    """(weights, losses, bytes held, bytes sent in the last step), with this rank's examples."""
    bare = models.build(recipe)
    model, optimizer = make(bare, recipe)
    losses = []
    for step in range(recipe.steps):
        parts, traffic = train.rows_of_step(recipe, len(data), step), Traffic()
        rows = parts[rank] if ranks > 1 else sum(parts, [])
        with traffic:
            loss = loss_sum(model, data.batch(rows), recipe) / sum(map(len, parts))
            (loss * ranks).backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
            frameworks.set_learning_rate(optimizer, recipe, step)
            gradients = held([parameter.grad for parameter in model.parameters()])
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    inner = getattr(optimizer, "optim", optimizer)
    states = [value for state in inner.state.values() for value in state.values()]
    bytes_ = {
        "parameters": held(model.parameters()), "gradients": gradients,
        "optimizer states": held(states),
    }  # fmt: skip
    total = torch.tensor(losses)
    if ranks > 1:
        dist.all_reduce(total)
    weights = torch.cat([whole(value).detach().flatten() for value in bare.parameters()])
    return weights, total.tolist(), bytes_, traffic.bytes


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    recipe = Recipe.from_dict(json.loads(sys.argv[1]))
    still_models()
    data = train.encoded(recipe)["train"]
    truth, expected, _, _ = tune(plain, recipe, data)
    engines = {}
    for name, make in ENGINES.items():
        weights, losses, bytes_, sent = tune(make, recipe, data, ranks, rank)
        engines[name] = {
            "losses": losses, "held": bytes_, "sent": sent, "distance": difference(weights, truth)
        }  # fmt: skip
    largest = max(value.numel() for value in models.build(recipe).parameters())
    told = {"expected": expected, "parameters": truth.numel(), "largest": largest}
    print("RESULT " + json.dumps(told | {"engines": engines}), flush=True)
    dist.barrier()

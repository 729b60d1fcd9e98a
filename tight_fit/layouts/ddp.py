"""torch's DistributedDataParallel, made to add gradients up over its ranks instead of averaging.

Each rank divides its loss by the examples of the whole step, as a single process does.
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# The models' buffers never change, so DDP need not send them. torch 2.13 has renamed the switch.
_DDP_SWITCHES = inspect.signature(DistributedDataParallel).parameters
_RENAMED = "forward_sync_buffers" in _DDP_SWITCHES
KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if _RENAMED else "broadcast_buffers": False,
}


class Buckets:
    """The sum of DDP's buckets over the ranks of a group, and the buckets, which stay allocated.

    buffers  those of the last backward pass that sent them
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.buffers: list[torch.Tensor] = []


def with_ddp(
    model: nn.Module, group: dist.ProcessGroup, views: bool = False
) -> tuple[DistributedDataParallel, Buckets]:
    """The model under DDP, whose gradients are added up over the ranks of `group`; its buckets.

    views  DDP's gradient_as_bucket_view: gradients lie in the buckets. By default, as PyTorch's,
           they are copied there, so that each gradient is held twice
    """
    ddp = DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=views, init_sync=False, **KEEP_BUFFERS
    )
    buckets = Buckets(group)
    ddp.register_comm_hook(buckets, add_up)
    return ddp, buckets


def add_up(buckets: Buckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DDP: the sum over the ranks, where DDP by itself takes the mean.

    DDP compares these annotations with its types, so this module must not make them strings by
    `from __future__ import annotations`.
    """
    if bucket.index() == 0:
        buckets.buffers.clear()
    buckets.buffers.append(bucket.buffer())
    work = dist.all_reduce(bucket.buffer(), group=buckets.group, async_op=True)
    return work.get_future().then(lambda future: bucket.buffer())

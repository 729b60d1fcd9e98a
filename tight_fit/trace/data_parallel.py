"""DistributedDataParallel in a step of one's own, on one rank of many that sends nothing.

The buckets are DDP's own: PyTorch's C++ makes them, of tensors without values, over its "fake"
process group, and lays them anew after the first backward pass. So are the gradients, views of the
buckets or tensors beside them (`gradient_as_bucket_view`). What NCCL holds is outside PyTorch's
allocator (`gpus.NCCL`). Two things that DDP sends are left out, with the copies they need for a
moment: the parameters when it is made, and the buffers before each forward pass.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tight_fit.torch_private import PRE_FORWARD, fake_store
from tight_fit.trace.fake_tensors import Indices
from tight_fit.trace.gpu_calls import Places

# torch 2.13 has renamed the switch.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


@contextmanager
def data_parallel(
    ranks: int | None,
    places: Places,
    rank: int = 0,
    sent: Callable[[torch.Tensor], None] = lambda bucket: None,
) -> Iterator[None]:
    """Inside, this process is one of `ranks` ranks, and DDP works; `sent` gets each bucket.

    `init_process_group` and `destroy_process_group` do nothing. With None DDP raises
    NotImplementedError, a sentence. Raises RuntimeError where there is a process group already.
    """
    if ranks is None:
        with patch.object(DistributedDataParallel, "__init__", _refused):
            yield
        return
    if dist.is_initialized():
        raise RuntimeError(
            "This process is a rank already: plan in a process that has no process group."
        )
    hook = sys.excepthook  # torch replaces it, to put the rank before every error message
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=fake_store())
    try:
        with _patched(places, sent):
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def _patched(places: Places, sent: Callable[[torch.Tensor], None]) -> Iterator[None]:
    make, before = DistributedDataParallel.__init__, getattr(DistributedDataParallel, PRE_FORWARD)

    def make_here(model, module, device_ids=None, output_device=None, *args: Any, **kwargs: Any):
        kwargs |= {"init_sync": False, _BUFFERS: False}
        with Indices(), places.inside_torch(), places.forced(True):  # the buckets are on the GPU
            make(model, module, None, None, *args, **kwargs)
            model.register_comm_hook(sent, _send_nothing)

    def before_forward(model, *args, **kwargs):
        with Indices(), places.inside_torch(), places.forced(True):
            return before(model, *args, **kwargs)

    with ExitStack() as patches:
        for owner, name, value in (
            (DistributedDataParallel, "__init__", make_here),
            (DistributedDataParallel, PRE_FORWARD, before_forward),
            (dist, "init_process_group", lambda *args, **kwargs: None),
            (dist, "destroy_process_group", lambda *args, **kwargs: None),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield


def _send_nothing(state, bucket):  # DDP compares annotations with its types: there are none
    """A communication hook that takes the mean in place, as DDP does, and sends nothing."""
    state(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


def _refused(model, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(
        "DistributedDataParallel needs to know how many ranks there are: give plan_custom_step "
        "ranks=2, for example."
    )

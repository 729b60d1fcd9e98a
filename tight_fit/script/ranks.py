"""A program for torchrun, planned as one rank of many: its process groups send nothing.

The rank, their number and what torchrun sets of its environment are there; `init_process_group`
finds a group that sends nothing. DistributedDataParallel makes its own buckets of tensors without
values (`trace.data_parallel`), `fully_shard` its own shards and buffers, and what is sent is
counted. Object collectives give what this rank has put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from tight_fit.layouts.fake_rank import Chunks
from tight_fit.layouts.messages import CommMeter, SentMessage
from tight_fit.layouts.torch_private_ranks import (
    fsdp_at_work,
    fsdp_move,
    fsdp_param_module,
    fsdp_states,
    meshes,
    without_ring,
)
from tight_fit.script.sandbox import NotPlanned
from tight_fit.script.watch import ScriptTracker
from tight_fit.trace.data_parallel import data_parallel
from tight_fit.trace.fake_tensors import Indices
from tight_fit.trace.gpu_calls import Places

ONE_MACHINE = 8  # GPUs of one machine, where nothing else is said
NAMED = "LOCAL_RANK", "WORLD_SIZE", "init_process_group"  # in the text of programs for torchrun


@dataclass(frozen=True)
class ProgramRank:
    """The rank that is planned: its number, of how many, and how many of them a machine has."""

    number: int = 0
    ranks: int = 2

    @property
    def machine(self) -> int:
        """GPUs of this rank's machine."""
        return min(self.ranks, ONE_MACHINE)

    @property
    def environment(self) -> dict[str, str]:
        """What torchrun tells a rank."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.number % self.machine),
            "LOCAL_WORLD_SIZE": str(self.machine),
            "GROUP_RANK": str(self.number // self.machine),
            "GROUP_WORLD_SIZE": str(-(-self.ranks // self.machine)),
            "ROLE_RANK": str(self.number),
            "ROLE_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "planned",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }


class Meter(CommMeter):
    """Counts what is sent, with the number of the tracker's event at which it is."""

    def __init__(self, tracker: ScriptTracker):
        events = tracker.storage_trace.events
        super().__init__(told=lambda: self.at.append(len(events)))
        self.tracker = tracker
        self.at: list[int] = []
        self.unknown: set[str] = set()

    def _count(self, name, args):
        try:
            super()._count(name, args)
        except NotImplementedError:
            self.unknown.add(name)

    def bucket(self, gradients: torch.Tensor) -> None:
        """DDP adds up a bucket of gradients over all ranks."""
        self.tracker.name_gradients([gradients])
        ranks = dist.get_world_size()
        if ranks == 1:
            return
        self.sent.append(SentMessage("all_reduce", gradients.nbytes, ranks, "", ""))
        self.told()

    def between(self, begin: int, end: int) -> dict[str, list[int]]:
        """{kind: [messages, bytes that this rank sends]} from one event to another."""
        totals: dict[str, list[int]] = {}
        for event, message in zip(self.at, self.sent):
            if begin < event <= end:
                total = totals.setdefault(message.kind, [0, 0])
                total[0] += 1
                total[1] += message.bytes
        return totals


@contextmanager
def one_of(rank: ProgramRank | None, places: Places, meter: Meter) -> Iterator[None]:
    """Inside, this process is that rank."""
    if rank is None:
        yield
        return
    from accelerate.accelerator import Accelerator  # takes a second, and few programs have ranks
    from accelerate.utils import DistributedType

    make_mesh = device_mesh.init_device_mesh

    def mesh_here(device_type, *args, **kwargs):
        # Of a mesh of CPUs, PyTorch waits for no streams. Its tensors are on the GPU all the same.
        with Indices():
            return make_mesh("cpu", *args, **kwargs)

    def not_received(*args, **kwargs):
        raise NotPlanned(
            "receives objects of another rank, as a pipeline's stages do to learn shapes, and no "
            "other rank is there: plan such a model with tight-fit --layout"
        )

    prepare = Accelerator.prepare

    def prepared(accelerator, *args, **kwargs):
        if accelerator.distributed_type == DistributedType.FSDP:
            raise NotPlanned(
                "shards its model by Accelerate's FSDP plugin, as Trainer's fsdp= does, which is "
                "not planned: plan the model with tight-fit MODEL --layout fsdp="
                f"{rank.ranks}, or a program that calls fully_shard itself"
            )
        return prepare(accelerator, *args, **kwargs)

    def objects(held, obj, *args, **kwargs):
        held[:] = [obj] * len(held)

    def gathered(obj, held=None, *args, **kwargs):
        if held is not None:
            held[:] = [obj] * len(held)

    with ExitStack() as patches:
        patches.enter_context(patch.dict("os.environ", rank.environment))
        patches.enter_context(without_ring())
        patches.enter_context(data_parallel(rank.ranks, places, rank.number, meter.bucket))
        group = dist.new_group
        for owner, name, value in (
            *((module, "init_device_mesh", mesh_here) for module in meshes()),
            (Accelerator, "prepare", prepared),
            (dist, "all_gather_object", objects),
            (dist, "gather_object", gathered),
            (dist, "broadcast_object_list", lambda *args, **kwargs: None),
            (dist, "send_object_list", lambda *args, **kwargs: None),
            (dist, "recv_object_list", not_received),
            (dist, "new_group", lambda ranks=None, *args, **kwargs: group(ranks)),
            *_on_the_gpu(places),
            (fsdp_param_module(), "_chunk_with_empty", Chunks),
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield


def _on_the_gpu(places: Places) -> Iterator[tuple[Any, str, Any]]:
    """FSDP2 at work: all that it makes is on the GPU, and it is told of one device only."""

    def there(work: Callable) -> Callable:
        def working(*args, **kwargs):
            with Indices(), places.inside_torch(), places.forced(True):
                return work(*args, **kwargs)

        return working

    for owner, name in fsdp_at_work():
        yield owner, name, there(getattr(owner, name))

    def moved(parameters, buffers, device):
        for tensor in parameters:
            if not places.on_gpu(tensor):
                with places.forced(True):
                    tensor.data = tensor.data.clone()
        places.named = True

    def states(modules, *ignored):
        # What a CPU knows, such as a decoder's angles, is only a shape on the GPU.
        for module in modules:
            for name, buffer in module.named_buffers(recurse=False):
                if not places.on_gpu(buffer):
                    with places.forced(True):
                        setattr(module, name, buffer.clone())
        return managed(modules, *ignored)

    yield *fsdp_move(), moved
    owner, name = fsdp_states()
    managed = getattr(owner, name)
    yield owner, name, states


def hint(script: str) -> str:
    """What to do for a program that torchrun starts, by its text; "" for another."""
    try:
        text = Path(script).read_text(encoding="utf8", errors="replace")
    except OSError:
        return ""
    if not any(name in text for name in NAMED):
        return ""
    return ". It is a program for torchrun: plan one of its ranks with --ranks, such as --ranks 2"

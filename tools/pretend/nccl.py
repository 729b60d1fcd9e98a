"""NCCL for the ranks of a rehearsal: process groups that have gloo underneath (native/nccl.h)."""

from __future__ import annotations

from types import ModuleType

import torch


def install(distributed: ModuleType) -> None:
    """Let torch.distributed.distributed_c10d make groups of the backend "nccl"."""
    make = distributed._new_process_group_helper

    def new_group(group_size, group_rank, ranks, backend, store, *more, **options):
        names = str(backend).lower()
        if names == "undefined":  # where no backend is named, torch takes one for each device
            backend = distributed.Backend(names := "cpu:gloo,cuda:nccl")
        if "nccl" not in names:
            return make(group_size, group_rank, ranks, backend, store, *more, **options)
        options.pop("backend_options", None)
        options.pop("device_id", None)
        alone = "gloo" not in names
        below = distributed.Backend("cuda:gloo" if alone else "cpu:gloo")
        group, prefix = make(group_size, group_rank, ranks, below, store, *more, **options)
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            return group, prefix
        torch.ops.pretended.add_nccl(group.boxed(), alone)
        group._set_default_backend(distributed.ProcessGroup.BackendType.NCCL)
        world = distributed._world
        world.pg_map[group] = (backend, world.pg_map[group][1])
        world.pg_backend_config[group] = str(distributed.BackendConfig(backend))
        return group, prefix

    distributed._new_process_group_helper = new_group
    distributed._NCCL_AVAILABLE = True
    # torch asks of a backend whether it is one; the groups made above are none.
    vars(distributed).setdefault("ProcessGroupNCCL", type("ProcessGroupNCCL", (), {}))
    distributed.default_pg_nccl_timeout = distributed.default_pg_timeout

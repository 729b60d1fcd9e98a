"""Every private name of PyTorch that the course uses, in one place.

These are modules and attributes that PyTorch may move or rename in any release. Nothing else in
`helpers` reaches into a module or a function whose name begins with an underscore;
tests/test_torch_private.py names what a new release has broken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "AsyncCollectiveTensor",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "clear_cublas_workspaces",
    "disable_current_modes",
    "fake_store",
    "forget_process_groups",
    "fsdp_param_module",
    "rebuild_buckets",
    "storage_key",
    "tree_leaves",
    "unset_fake_temporarily",
]

disable_current_modes = _disable_current_modes
TRUNCATED_NORMAL = (torch.nn.init, "_no_grad_trunc_normal_")  # draws until all values are in bounds
SKIPS_STEPS = "_maybe_opt_step"  # the method of GradScaler that leaves out a step that overflowed


def storage_key(storage: torch.UntypedStorage) -> int:
    """An address that two tensors share exactly when they share their memory, also without values."""
    return storage._cdata


def clear_cublas_workspaces() -> None:
    """Give back what matrix products took of the GPU's memory (needs CUDA)."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def rebuild_buckets(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Lay DDP's buckets anew in the order in which gradients came, as it does after its first step."""
    model.reducer._rebuild_buckets()


def fsdp_param_module():
    """The module of FSDP2 that cuts a parameter into shards; its `_chunk_with_empty` does so."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return _fsdp_param


def fake_store() -> torch.distributed.Store:
    """The store of the process group that sends nothing, and the collectives' rules of shapes."""
    from torch.distributed._tools import fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_process_groups() -> None:
    """Empty DTensor's caches: they hold layouts together with process groups that are gone by now."""
    for clear in _dtensor_caches():
        clear()


def _dtensor_caches() -> list[Callable[[], None]]:
    from torch.distributed.tensor import _redistribute, debug

    found = [
        debug._clear_python_sharding_prop_cache,
        debug._clear_fast_path_sharding_prop_cache,
        getattr(_redistribute, "_planner_cache", {}).clear,
    ]
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed.tensor"):
            continue
        holders = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for holder in holders:
            found += [
                value.cache_clear
                for value in vars(holder).values()
                if not isinstance(value, type) and hasattr(value, "cache_clear")
            ]
    return found

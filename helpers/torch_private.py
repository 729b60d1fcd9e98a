"""Every private name of PyTorch that the course uses, in one place.

PyTorch may move or rename these modules and attributes in any release. No other module of `helpers`
imports a name of torch that begins with an underscore; tests/test_torch_private.py says which names
a new release has broken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "WRAPPERS",
    "AsyncCollectiveTensor",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "clear_cublas_workspaces",
    "disable_current_modes",
    "fake_store",
    "foreach_mul_",
    "foreach_norm",
    "forget_process_groups",
    "fsdp_param_module",
    "in_backward",
    "is_view",
    "load_cuda_kernel",
    "no_work",
    "parse_to",
    "process_group",
    "rebuild_buckets",
    "storage_key",
    "tree_leaves",
    "unset_fake_temporarily",
    "written_arguments",
]

disable_current_modes = _disable_current_modes
WRAPPERS = (DTensor, AsyncCollectiveTensor)  # tensors that wrap another tensor
foreach_mul_ = torch._foreach_mul_  # a list of tensors times a number, in place
parse_to = torch._C._nn._parse_to  # reads the arguments of `nn.Module.to`
foreach_norm = torch._foreach_norm  # the L2 norms of a list of tensors
# The function that draws until all values are within the bounds.
TRUNCATED_NORMAL = (torch.nn.init, "_no_grad_trunc_normal_")
SKIPS_STEPS = "_maybe_opt_step"  # the method of GradScaler that leaves out a step that overflowed
# (module, name) of what decides whether an optimizer updates many tensors by one kernel: functions
# that list devices, and lists of the types of tensors.
_FOREACH = (import_module("torch.optim.optimizer"), import_module("torch.utils._foreach_utils"))
FOREACH_DEVICES = tuple((module, "_get_foreach_kernels_supported_devices") for module in _FOREACH)
FOREACH_TYPES = tuple((module, "_foreach_supported_types") for module in _FOREACH)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that two tensors share exactly when they share their memory.

    It also holds for tensors without values, whose addresses are all 0.
    """
    return storage._cdata


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


@cache
def is_view(function: torch._ops.OpOverload) -> bool:
    """Whether every result of a dispatched operation shares memory with an argument unchanged."""
    returns = function._schema.returns
    return bool(returns) and all(
        part.alias_info is not None and not part.alias_info.is_write for part in returns
    )


@cache
def written_arguments(function: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that a dispatched operation changes in place."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def no_work() -> set[Callable]:
    """The operations that are dispatched and do nothing.

    Tensors without values ask for their device, and the profiler marks a range.
    """
    return {
        torch.ops.prim.device.default,
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }


def clear_cublas_workspaces() -> None:
    """Give back the GPU memory that matrix products took as workspace; needs CUDA."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def load_cuda_kernel(image: bytes, name: str) -> Callable:
    """A function of compiled CUDA code, loaded on the current GPU. PyTorch has this from 2.8 on.

    image  machine code ("cubin") or PTX
    name   of an `extern "C" __global__` function in it

    The result is called as kernel(grid, block, arguments), with two triples of ints and a list of
    CUDA tensors, which become pointers, and ints, which become 32-bit ints. It runs on the current
    stream. Raises RuntimeError in the words of the driver.
    """
    from torch.cuda._utils import _cuda_load_module

    kernels = _cuda_load_module(image, [name])
    assert isinstance(kernels, dict)  # as names were given
    return kernels[name]


def rebuild_buckets(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Make DDP's buckets again, in the order in which the gradients came.

    DDP does so itself after its first step.
    """
    model.reducer._rebuild_buckets()


def process_group(arguments: Sequence[object]) -> torch.distributed.ProcessGroup | None:
    """The process group that an operator's arguments name, or hold as an object; None for none."""
    names: list[Any] = [value for value in arguments if isinstance(value, str)]
    if names:  # the group's is the last of the names
        return torch.distributed.distributed_c10d._resolve_process_group(names[-1])
    for value in arguments:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return torch.distributed.ProcessGroup.unbox(value)
    return None


def fsdp_param_module():
    """The module of FSDP2 that cuts parameters into shards, with its `_chunk_with_empty`."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return _fsdp_param


def fake_store() -> torch.distributed.Store:
    """The store of a process group that sends nothing.

    It also registers what shapes the collectives give on tensors without values.
    """
    from torch.distributed._tools import fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_process_groups() -> None:
    """Empty the caches of DTensor, whose layouts refer to process groups that no longer exist."""
    for clear in _dtensor_caches():
        clear()


def _dtensor_caches() -> list[Callable[[], None]]:
    """The functions that empty a cache of DTensor, as far as its modules have been imported."""
    from torch.distributed.tensor import _redistribute, debug

    clearers = [
        debug._clear_python_sharding_prop_cache,
        debug._clear_fast_path_sharding_prop_cache,
        getattr(_redistribute, "_planner_cache", {}).clear,
    ]
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed.tensor"):
            continue
        holders = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for holder in holders:
            clearers += [
                value.cache_clear
                for value in vars(holder).values()
                if not isinstance(value, type) and hasattr(value, "cache_clear")
            ]
    return clearers

"""PyTorch's private names for many ranks: process groups, DDP, FSDP2, DTensor, pipelines.

As `tight_fit.torch_private`, which holds all others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

__all__ = [
    "forget_process_groups",
    "fsdp_at_work",
    "fsdp_move",
    "fsdp_param_module",
    "fsdp_states",
    "meshes",
    "lay_out_messages",
    "process_group",
    "put_ring_under_attention",
    "rebuild_buckets",
    "sent_until_waited_for",
    "shapes_of_dtensor",
    "without_ring",
    "whole_gradients",
]

RING_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
RING_ATTENTION_BACKWARD = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)
# How the ring gathers keys and values: PyTorch 2.11 has the second name, later ones the first.
RING_GATHER = next(
    name for name in ("all_gather_single", "all_gather_tensor") if hasattr(functional, name)
)


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


def fsdp_at_work() -> Iterator[tuple[Any, str]]:
    """(owner, name) of the functions in which FSDP2 makes shards, buffers and messages."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state, _fully_shard

    yield _fully_shard, "_init_param_group"
    for name in ("_pre_forward", "_post_forward", "_pre_backward"):
        yield _fsdp_state.FSDPState, name
    yield _fsdp_state.FSDPState, "_root_post_backward_final_callback"
    for name in ("unshard", "wait_for_unshard", "reshard", "post_backward", "finalize_backward"):
        yield _fsdp_param_group.FSDPParamGroup, name


def fsdp_move() -> tuple[Any, str]:
    """(owner, name) of the function by which FSDP2 moves parameters to the device of its mesh."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    return _fsdp_init, "_move_states_to_device"


def fsdp_states() -> tuple[Any, str]:
    """(owner, name) of the function that gives FSDP2 the parameters and buffers of its modules."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    return _fsdp_init, "_get_managed_states"


def meshes() -> list[Any]:
    """The modules that have `init_device_mesh` by that name."""
    from torch.distributed import device_mesh, tensor
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    return [torch.distributed, device_mesh, tensor, _fsdp_init]


def lay_out_messages(
    schedule: Any, stages: Sequence[Any], inputs: tuple, labels: torch.Tensor | None
) -> None:
    """Let a schedule of torch.distributed.pipelining make the buffers of its messages.

    It does so itself in its first step.
    """
    for stage in stages:
        stage.has_backward = True
    several = getattr(schedule, "_initialize_stages", None)
    (several or schedule._initialize_stage)(inputs, {}, labels)


@contextmanager
def sent_until_waited_for() -> Iterator[None]:
    """Inside, torch's pipelines hold what they send until they let go of the work, as gloo and NCCL
    do; the process group that sends nothing does not."""
    from torch.distributed.pipelining import schedules

    start = schedules._batch_p2p

    def held(operations: list, desc: str | None = None) -> list:
        works: list = start(operations, desc)
        return [*works, _Held([operation.tensor for operation in operations])] if works else works

    with patch.object(schedules, "_batch_p2p", held):
        yield


class _Held:
    """Work that is done, and holds its tensors."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors

    def wait(self) -> None:
        pass


def whole_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """The gradients that FSDP2 has not yet divided over its ranks."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for held in group.fsdp_params:
                    whole = getattr(held, "_unsharded_param", None)
                    found += [
                        held.unsharded_accumulated_grad,
                        None if whole is None else whole.grad,
                    ]
    return [gradient for gradient in found if gradient is not None]


def shapes_of_dtensor() -> tuple[type, str]:
    """The class and the name of its method by which DTensor asks for the shape of a result.

    It runs the operation on tensors without values, of the size of the whole.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def put_ring_under_attention() -> None:
    """Let attention of tensors whose tokens ranks divide (DTensor, sharded along dimension 2) be
    PyTorch's ring on CPUs as well.

    PyTorch registers its ring for the kernels of CUDA; here the same loops call the CPU's kernel.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for function in (RING_ATTENTION, RING_ATTENTION_BACKWARD):
        handlers[function] = _ring


@contextmanager
def without_ring() -> Iterator[None]:
    """Inside, attention of DTensors is PyTorch's alone: a program's is no layout that was planned
    in this process."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    rings = {name: function for name, function in handlers.items() if function is _ring}
    for name in rings:
        del handlers[name]  # in place, as PyTorch holds these from the first DTensor on
    try:
        yield
    finally:
        handlers.update(rings)


def _ring(op_call: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """The CPU's fused attention of DTensors, or its backward pass."""
    from torch.distributed.tensor.experimental import _context_parallel

    loops: Any = _context_parallel._attention
    first = next(value for value in args if isinstance(value, DTensor))
    mesh, (placement, *others) = first.device_mesh, first.placements
    if others or not placement.is_shard(2) or kwargs.get("attn_mask") is not None:
        raise NotImplementedError(
            "Attention of DTensors on CPUs is a ring over one dimension of ranks, without a mask: "
            "let it work on plain tensors."
        )
    local = [value.to_local() if isinstance(value, DTensor) else value for value in args]
    tensors = 6 if op_call is RING_ATTENTION_BACKWARD else 3
    dropout, causal = (*local[tensors:], 0.0, False)[:2]
    settings = {"is_causal": causal, "dropout_p": dropout, "scale": kwargs.get("scale")}
    fake = isinstance(local[0], FakeTensor)
    # As PyTorch has it where nobody chose otherwise in this process (`set_rotate_method`).
    usual = {"enable_load_balance": causal, "rotate_method": loops._RotateMethod.ALL_GATHER}
    with patch.multiple(loops._cp_options, **usual), _in_flight(fake):
        if op_call is RING_ATTENTION:
            results = loops._templated_ring_attention(
                mesh.get_group(), 2, op_call, *local[:3], **settings
            )
        else:
            gradient, *saved = local[:6]
            results = loops._templated_ring_attention_backward(
                mesh.get_group(), 2, op_call, gradient, "grad_out", *saved, **settings
            )
    return tuple(
        DTensor.from_local(result, mesh, (placement,), run_check=False) for result in results
    )


@contextmanager
def _in_flight(fake: bool) -> Iterator[None]:
    """Inside, messages of tensors without values are waited for where those of others are, and what
    is sent is held until then.

    PyTorch takes tensors without values for those of a compiler, and waits at once. To wait for a
    tensor gives that tensor back, and a copy of one without values: here it gives that back too.
    """
    if not fake:
        yield
        return
    wait = torch.ops._c10d_functional.wait_tensor
    held: dict[int, torch.Tensor] = {}

    def holding(send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            coming = send(tensor, *args, **kwargs)
            held[id(coming.elem)] = tensor
            return coming

        return sent

    def waited(tensor: torch.Tensor) -> torch.Tensor:
        wait(tensor[:0])  # for those who watch what is dispatched
        held.pop(id(tensor), None)
        return tensor

    with (
        patch.object(functional, "_maybe_wrap_tensor", functional.AsyncCollectiveTensor),
        patch.object(functional, RING_GATHER, holding(getattr(functional, RING_GATHER))),
        patch.object(functional, "permute_tensor", holding(functional.permute_tensor)),
        patch.object(functional, "wait_tensor", waited),
    ):
        yield


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

"""The private names of PyTorch that the course uses, in one place.

Those for many ranks are in `tight_fit.layouts.torch_private_ranks`. PyTorch may move or rename
these modules and attributes in any release. No other module imports a name of torch that
begins with an underscore; tests/test_torch_private.py says which names a new release has
broken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# What comes from torch as it is; the others are made below.
__all__ = [
    "AsyncCollectiveTensor",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "OpOverload",
    "TorchFakeTensorMode",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unset_fake_temporarily",
]

disable_current_modes = _disable_current_modes
# What PyTorch dispatches to ask a tensor without values for its device, thousands of times a step.
DEVICE_OF = torch.ops.prim.device.default
WRAPPERS = (DTensor, AsyncCollectiveTensor)  # tensors that wrap another tensor


@cache
def _is_wrapper(kind: type) -> bool:
    return issubclass(kind, WRAPPERS) or is_traceable_wrapper_subclass_type(kind)


def has_wrapper(kinds: Iterable[type]) -> bool:
    """Whether a tensor of these types wraps others, such as torchao's in 8 bits.

    A mode leaves an operation on it alone: those on the tensors inside come by themselves.
    """
    return any(map(_is_wrapper, kinds))


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that one of `WRAPPERS` wraps."""
    wrapper: Any = tensor
    return wrapper._local_tensor if isinstance(wrapper, DTensor) else wrapper.elem


# Adam's update of many tensors by one kernel, in place.
FUSED_ADAM = (torch._fused_adam_, torch._fused_adamw_)
foreach_mul_ = torch._foreach_mul_  # a list of tensors times a number, in place
parse_to = torch._C._nn._parse_to  # reads the arguments of `nn.Module.to`
foreach_norm = torch._foreach_norm  # the L2 norms of a list of tensors
# The function that draws until all values are within the bounds.
TRUNCATED_NORMAL = (torch.nn.init, "_no_grad_trunc_normal_")
# (class, name) of what makes a tensor of another class of the same data, without its constructor.
MAKE_SUBCLASS = (torch.Tensor, "_make_subclass")
SKIPS_STEPS = "_maybe_opt_step"  # the method of GradScaler that leaves out a step that overflowed
# (module, name) of what decides whether an optimizer updates many tensors by one kernel: functions
# that list devices, and lists of the types of tensors.
_FOREACH = (import_module("torch.optim.optimizer"), import_module("torch.utils._foreach_utils"))
FOREACH_DEVICES = tuple((module, "_get_foreach_kernels_supported_devices") for module in _FOREACH)
# (module, name) of Adam's update of many tensors by one kernel; the last operation in it.
ADAM_FOREACH = (import_module("torch.optim.adam"), "_multi_tensor_adam")
FOREACH_ADDCDIV = "_foreach_addcdiv_"
# {name: what checkpointing compares of a tensor that was saved and of the same one recomputed}.
CHECKPOINT_CHECKS = import_module("torch.utils.checkpoint")._allowed_determinism_checks_to_fns
# Called with a function of (device, bytes asked for, bytes allocated, bytes free), it lets CUDA's
# allocator call it before "out of memory" is raised; only PyTorch's builds for CUDA have it.
OUT_OF_MEMORY_OBSERVER = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
PRE_FORWARD = "_pre_forward"  # the method of DistributedDataParallel that lays its buckets anew
FOREACH_TYPES = tuple((module, "_foreach_supported_types") for module in _FOREACH)


class PlainDispatchMode(TorchDispatchMode):
    """A dispatch mode that nobody compiles, so that its calls need not be hidden from Dynamo.

    PyTorch hides those of every other mode, which takes longer than what the mode does.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_of(mode: TorchFakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """A tensor on the meta device as a fake one of the CPU, with the same storage."""
    return FakeTensor(mode, tensor, torch.device("cpu"))


def as_parameter(fake: FakeTensor) -> FakeTensor:
    """The same tensor as a parameter, for which `nn.Parameter` would take three operations."""
    fake._is_param = True
    return fake


def scaled_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    of_left: torch.Tensor,
    of_right: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """The product of two matrices in 8 bits, times their fp32 scales, in `dtype`.

    left   [m, k], its rows contiguous, and `right` [k, n], its columns
    scales scalars, or [m, 1] and [1, n]; with those the kernel writes bf16
    fast   whether a GPU may add in fewer bits than fp32
    """
    written = torch.bfloat16 if of_left.dim() else dtype
    product = torch._scaled_mm(
        left, right, scale_a=of_left, scale_b=of_right, out_dtype=written, use_fast_accum=fast
    )
    return product.to(dtype)


@cache
def start_autograd() -> None:
    """Let autograd count the GPUs and start their threads: a backward pass of no tensors."""
    torch.autograd.backward([])


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that two tensors share exactly when they share their memory.

    It also holds for tensors without values, whose addresses are all 0.
    """
    return storage._cdata


def device_for_torch(tensor: FakeTensor) -> torch.device:
    """The device that PyTorch's own code is told of, whatever a user is told (`plan.gpu_calls`)."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


ADD = torch.ops.aten.add.Tensor


def adds_in_place(function: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether autograd would do this operation in place if no mode watched it.

    Where several gradients of one tensor meet, the engine adds the next one to the first in place,
    if nothing else holds that one (accumulate in torch/csrc/autograd/input_buffer.cpp). While a
    dispatch mode is on, it makes a new tensor instead. Call it in `__torch_dispatch__` of the
    innermost mode, before the operation, and `count_holders` once before that.
    """
    if function is not ADD or len(args) != 2 or kwargs or torch.is_grad_enabled():
        return False
    if not in_backward() or not all(isinstance(value, torch.Tensor) for value in args):
        return False
    first, second = args
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and is_dense(first)
        and _holders(first) == count_holders()
        and not _in_python_function()
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one piece of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    """(how often a tensor is held, how often its storage), by PyTorch's own counts."""
    held: Any = tensor
    return held._use_count(), torch._C._storage_Use_Count(storage_key(tensor.untyped_storage()))


@cache
def count_holders() -> tuple[int, int]:
    """`_holders` of a gradient that only the engine holds; dispatch itself adds some.

    The first call runs a backward pass, so it must come before `adds_in_place`, outside dispatch.
    """
    seen: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is ADD:
                seen.append(_holders(args[0]))
            return function(*args, **(kwargs or {}))

    with torch.enable_grad(), disable_current_modes():
        leaf = torch.ones(2, requires_grad=True)
        loss = (leaf * 2).sum() + (leaf * 3).sum()
        with Probe():
            loss.backward()
    return seen[-1]


def _in_python_function() -> bool:
    """Whether the backward pass of a `torch.autograd.Function` written in Python is running."""
    frame = sys._getframe(1)
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "torch.autograd.function" and name == "apply":
            return True
        if module == "torch.autograd.graph" and name == "_engine_run_backward":
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


@cache
def is_view(function: OpOverload) -> bool:
    """Whether every result of a dispatched operation shares memory with an argument unchanged."""
    returns = function._schema.returns
    return bool(returns) and all(
        part.alias_info is not None and not part.alias_info.is_write for part in returns
    )


@cache
def written_arguments(function: OpOverload) -> tuple[tuple[int, str], ...]:
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
        DEVICE_OF,
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    }


def clear_cublas_workspaces() -> None:
    """Give back the GPU memory that matrix products took as workspace; needs CUDA."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def load_cuda_kernel(image: bytes, name: str) -> Callable:
    """A function of compiled CUDA code, loaded on the current GPU.

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


def fake_store() -> torch.distributed.Store:
    """The store of a process group that sends nothing.

    It also registers what shapes the collectives give on tensors without values.
    """
    from torch.distributed._tools import fake_collectives  # noqa: F401
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def inductor(
    seen: Callable[[torch.fx.GraphModule], object],
    run: Callable[[torch.fx.GraphModule, bool], Callable[[list], Any]] | None = None,
    decomposed: Mapping[Any, Callable] | None = None,
    joint: Callable[[torch.fx.Graph], object] | None = None,
    stay: int = 0,
) -> Callable:
    """The backend of `torch.compile` that it takes by itself, which tells of each graph it gets.

    seen  is called with each graph of a forward pass before it is compiled
    run   makes what runs a graph in place of code: graphs are cut and rewritten as inductor does.
          Of a graph, and whether it is one of a backward pass, it makes a function of a list of
          inputs, which it may clear; `one_by_one` also runs on tensors without values. The graph's
          meta["donated"] has the places of the inputs that its kernels may write over
    decomposed  what stands for further operations, beside those that inductor decomposes
    joint  may change, in place, the graph of both passes before it is cut
    stay   how many of a graph's first inputs stay in memory, as a module's weights do, and cost
           nothing to keep; for graphs that do not come from Dynamo, which says so itself
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import get_donated_idxs

    def keep(graph, inputs, **options):
        backward = options.get("is_backward", False)
        graph.meta["donated"] = (get_donated_idxs() or []) if backward else []
        function: Any = run(graph, backward)  # type: ignore[misc]

        def boxed(arguments):
            return function(arguments)

        boxed._boxed_call = True  # type: ignore[attr-defined]  # it may free what it was given
        return boxed

    def backend(graph, inputs):
        seen(graph)
        if run is None:
            return compile_fx(graph, inputs)
        table = {**select_decomp_table(), **(decomposed or {})}
        if stay:
            _say_what_stays(graph, stay)
        with config.patch(joint_custom_pre_pass=joint):
            return compile_fx(graph, inputs, inner_compile=keep, decompositions=table)

    return backend


def _say_what_stays(graph: Any, count: int) -> None:
    """Mark a graph's first inputs as Dynamo marks weights, in the words of
    `_try_get_metadata_from_dynamo` (torch/_functorch/_aot_autograd/frontend_utils.py)."""
    graph.meta["dynamo_compile_id"] = None
    vars(graph)["_param_name_to_source"] = {}
    for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node._dynamo_source = None
        if place < count:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def call_with(module: torch.nn.Module, in_place: Callable[[], Callable]) -> None:
    """Let a module call what `in_place()` makes of its `forward`, where `Module.compile` puts
    compiled code: copies of the module do not have it. It is made at the first call, as torch
    compiles then, and anew where the `forward` is another: Accelerate puts autocast around it."""
    made: list[Callable] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not made or made[0] != module.forward:
            made[:] = module.forward, in_place()
        with patch.object(module, "forward", made[1]):
            return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = call


def one_by_one(graph: torch.fx.GraphModule, backward: bool) -> Callable[[list], Any]:
    """Runs a graph operation by operation, for `inductor`."""

    def run(arguments: list) -> Any:
        given = list(arguments)
        arguments.clear()
        return graph(*given)

    return run

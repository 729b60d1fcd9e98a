"""What users write for a GPU in a step of their own, on fake CPU tensors.

`.cuda()`, `device="cuda"`, `autocast("cuda")` and `GradScaler("cuda")` need a GPU. Here they work
without one: `Places` knows which tensors would be on the GPU, `GPUCalls` answers the calls that
name a device, and `as_on_gpu` replaces what would switch itself off.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tight_fit.torch_private import (
    CHECKPOINT_CHECKS,
    FOREACH_DEVICES,
    FOREACH_TYPES,
    SKIPS_STEPS,
    WRAPPERS,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    has_wrapper,
    inside,
    parse_to,
    storage_key,
    tree_leaves,
)
from tight_fit.trace.cuda_kernels import OPENED, CudaKernels, Function, opened

GPU_0 = torch.device("cuda", 0)
IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
COPIES = {torch.as_tensor, torch.asarray}  # like `Tensor.to`, they may return their argument
# PyTorch would switch modes off inside them; recomputed activations would then be a CPU's.
BACKWARD: dict[Function, Function] = {
    function: opened(function)
    for function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}


class Places(TorchDispatchMode):
    """Knows which storages are on the GPU: moved there, made there, or computed from such.

    Enter it inside `FakeTensorMode` and outside the tracker.

    named  whether a call has named CUDA as a device so far
    gpu    the device that tensors on the GPU say they are on
    """

    def __init__(self):
        super().__init__()
        self.named, self.gpu = False, GPU_0
        self._on_gpu: dict[int, bool] = {}  # key of a storage -> is it on the GPU?
        self._storages: dict[int, weakref.ref] = {}
        self._forced: bool | None = None
        self._inside = False

    @contextmanager
    def inside_torch(self) -> Iterator[None]:
        """Inside, PyTorch itself asks for devices, and is told of the CPU."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def device(self, tensor: FakeTensor) -> torch.device:
        """The device of a tensor as a user is told of it."""
        told = self.named and not self._inside and self.on_gpu(tensor)
        return self.gpu if told else tensor.fake_device

    def on_gpu(self, held: torch.Tensor | torch.UntypedStorage) -> bool:
        """Whether a tensor or a storage is on the GPU."""
        while isinstance(held, WRAPPERS):
            held = inside(held)
        storage = held.untyped_storage() if isinstance(held, torch.Tensor) else held
        return self._on_gpu.get(storage_key(storage), False)

    def put_on_gpu(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that tensors are on the GPU."""
        for tensor in tensors:
            self._note(tensor.untyped_storage(), True)

    def storages_on_gpu(self) -> list[torch.UntypedStorage]:
        """What is alive on the GPU, in the order in which it was made."""
        alive = [self._storages[key]() for key, on_gpu in self._on_gpu.items() if on_gpu]
        return [storage for storage in alive if storage is not None]

    @property
    def all_on_gpu(self) -> bool:
        """Whether whatever is made now is on the GPU."""
        return bool(self._forced)

    @contextmanager
    def forced(self, on_gpu: bool) -> Iterator[None]:
        """Inside, what is made is on the GPU, or is not, whatever it is computed from."""
        before, self._forced = self._forced, on_gpu
        try:
            yield
        finally:
            self._forced = before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if has_wrapper(types):
            return NotImplemented  # the tensors inside are dispatched again, one by one
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with self.inside_torch():
            result = function(*args, **kwargs)
        if function is torch.ops.aten.as_strided.default and self._forced:
            self.put_on_gpu(given)  # a bucket of DDP, which C++ has made unseen
        known = {storage_key(tensor.untyped_storage()) for tensor in given}
        place = self._forced
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage_key(storage) not in known | self._on_gpu.keys():
                    if place is None:
                        place = any(map(self.on_gpu, given))
                    self._note(storage, place)
        return result

    def _note(self, storage: torch.UntypedStorage, on_gpu: bool) -> None:
        key = storage_key(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self._forget, key).atexit = False
        self._on_gpu[key] = on_gpu

    def _forget(self, key: int) -> None:
        self._on_gpu.pop(key, None)
        self._storages.pop(key, None)


class GPUCalls(CudaKernels):
    """A GPU's kernels, and calls that name a GPU as the device, all on fake CPU tensors.

    A tensor that is moved is copied. Unlike in `CudaKernels` alone, the mode stays on during
    `backward`, so that recomputed activations are a GPU's as well.

    places  is told what is moved or made where
    flash   as for `CudaKernels`
    """

    def __init__(self, places: Places, flash: bool = True):
        super().__init__(SimpleNamespace(precision="bf16"), flash=flash)
        self.places = places
        self._backward_on_gpu = False  # what the last operation of a backward pass worked on

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if isinstance(function, OpOverload):
            return self._in_backward(function, types, args, kwargs)
        if function in BACKWARD:
            with self:
                return BACKWARD[function](*args, **kwargs)
        if function in OPENED:
            return super().__torch_function__(function, types, args, kwargs)
        with self.places.inside_torch():
            return self._answer(function, types, args, kwargs)

    def _in_backward(self, function, types, args, kwargs):
        """An operation of autograd, which takes all tensors for a CPU's and may name that device.

        What it makes is where its operands are: the gradient of a cast weight stays on the GPU.
        """
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if given:
            self._backward_on_gpu = any(map(self.places.on_gpu, given))
        with self.places.inside_torch():
            if kwargs.get("device") is None:
                return super().__torch_function__(function, types, args, kwargs)
            with self.places.forced(self._backward_on_gpu):
                return super().__torch_function__(function, types, args, kwargs)

    def _answer(self, function, types, args, kwargs):
        if function in (IS_CUDA, IS_CPU, torch.Tensor.get_device):
            if self.places.named and self.places.on_gpu(args[0]):
                return {IS_CUDA: True, IS_CPU: False}.get(function, self.places.gpu.index)
            return function(*args, **kwargs)
        if function is torch.Tensor.cuda:
            return self._moved(args[0], True, args[0].dtype)
        if function is torch.Tensor.cpu:
            return self._moved(args[0], False, args[0].dtype)
        if function in (torch.Tensor.pin_memory, torch.Tensor.is_pinned):
            return args[0].clone() if function is torch.Tensor.pin_memory else False
        if function is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if function is parse_to:  # `module.to(0)`; its tensors are moved one by one after that
            if args and type(args[0]) is int:
                args = (torch.device("cuda", args[0]), *args[1:])
            return function(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if function in COPIES and isinstance(args[0], torch.Tensor):
            return self._to(*args, **kwargs)
        if device is None:
            return super().__torch_function__(function, types, args, kwargs)
        on_gpu = self._is_gpu(device)
        if on_gpu:
            kwargs["device"] = torch.device("cpu")
        with self.places.forced(on_gpu or self.places.all_on_gpu):
            return super().__torch_function__(function, types, args, kwargs)

    def _is_gpu(self, device: str | int | torch.device) -> bool:
        on_gpu = isinstance(device, int) or torch.device(device).type == "cuda"
        self.places.named |= on_gpu
        return on_gpu

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What `Tensor.to` returns, in all its forms: device, dtype, both, or another tensor."""
        on_gpu, dtype, flags = self.places.on_gpu(tensor), tensor.dtype, []
        for value in (*args, kwargs.pop("device", None), kwargs.pop("dtype", None)):
            if isinstance(value, bool):
                flags.append(value)  # non_blocking, copy
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, torch.Tensor):
                kwargs["other"] = value
            elif value is not None:
                on_gpu = self._is_gpu(value)
        other = kwargs.pop("other", None)
        if other is not None:
            on_gpu, dtype = self.places.on_gpu(other), other.dtype
        copy = kwargs.get("copy") or flags[1:] == [True]
        return self._moved(tensor, on_gpu, dtype, bool(copy), kwargs.get("memory_format"))

    def _moved(
        self,
        tensor: torch.Tensor,
        on_gpu: bool,
        dtype: torch.dtype,
        copy: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """The tensor itself where nothing changes, else a copy."""
        self.places.named |= on_gpu and not self.places.on_gpu(tensor)
        if not self.places.named:
            on_gpu = self.places.on_gpu(tensor)
        copy |= on_gpu != self.places.on_gpu(tensor)
        layout = torch.preserve_format if memory_format is None else memory_format
        with self.places.forced(on_gpu):
            return tensor.to(dtype, copy=copy, memory_format=layout)


@contextmanager
def as_on_gpu(places: Places, foreach: bool = True) -> Iterator[None]:
    """Inside, what looks for a GPU and finds none behaves as on one.

    Autocast for "cuda" is on, with fp16 unless told otherwise. A gradient scaler is enabled, and
    never skips a step, as gradients without values do not overflow. Optimizers and clipping update
    many tensors by one kernel unless told otherwise; `foreach=False` leaves that out. A tensor that
    is on the GPU by `places` says so. Checkpointing does not compare devices: PyTorch is told of
    the CPU where it saves a tensor, and a user of the GPU where it is compared.
    """

    def device_of(tensor):
        return told.fget(tensor) if tensor.fake_mode.in_kernel_invocation else places.device(tensor)

    told: Any = FakeTensor.device
    autocast, scaler = torch.autocast, torch.amp.GradScaler
    make, enabled, dtype_of = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def make_for_cpu(context, device_type, dtype=None, enabled=True, cache_enabled=None):
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or dtype_of("cuda")
        make(context, device_type, dtype, enabled, cache_enabled)

    def always_step(scaler, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)

    with ExitStack() as patches:
        for owner, name, value in (
            (autocast, "__init__", make_for_cpu),
            (torch, "is_autocast_enabled", lambda device_type="cuda": enabled("cpu")),
            (torch, "get_autocast_dtype", lambda device_type="cuda": dtype_of("cpu")),
            (scaler, SKIPS_STEPS, always_step),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "synchronize", lambda device=None: None),
            (FakeTensor, "device", property(device_of, told.fset)),
            *((*place, lambda: ["cpu", "cuda"]) for place in FOREACH_DEVICES if foreach),
            *((*place, [*getattr(*place), FakeTensor]) for place in FOREACH_TYPES if foreach),
        ):
            patches.enter_context(patch.object(owner, name, value))
        shape_and_dtype = {"default": lambda tensor: (tensor.shape, tensor.dtype)}
        patches.enter_context(patch.dict(CHECKPOINT_CHECKS, shape_and_dtype))
        yield

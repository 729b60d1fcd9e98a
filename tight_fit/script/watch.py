"""The tracker of a program: what is alive, in which category, and which line made it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tight_fit.plans.own_step import GPUTracker
from tight_fit.script.where import Origin, UserCode
from tight_fit.torch_private import (
    WRAPPERS,
    FakeTensor,
    has_wrapper,
    in_backward,
    inside,
    storage_key,
    tree_leaves,
    written_arguments,
)
from tight_fit.trace.gpu_calls import Places
from tight_fit.trace.quantized import state_of
from tight_fit.trace.storage_trace import GRADIENTS, OPTIMIZER, PARAMETERS

FORWARD, BACKWARD, UPDATE = range(3)
MADE_UNSEEN = {"lift_fresh", "lift"}  # operations whose argument PyTorch has just made


class ScriptTracker(GPUTracker):
    """Follows every storage of a program, with the line that made it.

    origins    {storage: (Origin, shape, dtype)}
    elements   {storage: how many parameters it holds}, where that is not its number of elements
    whole      {storage of a parameter: elements of all ranks together}
    updating   whether an optimizer is at work now
    """

    def __init__(self, places: Places, code: UserCode):
        super().__init__(places)
        self.code, self.updating = code, False
        self.origins: dict[int, tuple[Origin, tuple[int, ...], torch.dtype]] = {}
        self.elements: dict[int, int] = {}
        self.whole: dict[int, int] = {}
        self._alive_bytes, self._most_bytes = [0, 0], [0, 0]  # of all places, of the GPU
        self._foreign: set[int] = set()
        self._into_real = False
        self._shape: tuple[tuple[int, ...], torch.dtype] = (), torch.float32

    def __exit__(self, *exception):
        as_seen = self.storage_trace.events  # sorted deaths would cross the ends of steps
        result = super().__exit__(*exception)
        self.storage_trace.events = as_seen
        return result

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if has_wrapper(types):
            return NotImplemented  # the tensors inside are dispatched again, one by one
        self._phase = BACKWARD if in_backward() else UPDATE if self.updating else FORWARD
        self._foreign = set()
        if function.overloadpacket.__name__ not in MADE_UNSEEN:
            # Memory that PyTorch's allocator did not give: NumPy's, or that of a mapped file.
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                    key = storage_key(leaf.untyped_storage())
                    if key not in self._alive:
                        self._foreign.add(key)
        self._into_real = _writes_to_real(function, args, kwargs or {})
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _see(self, tensor: torch.Tensor, category: int, made_by: str, new: bool = False) -> None:
        if new and self._foreign and storage_key(tensor.untyped_storage()) in self._foreign:
            return
        if new and self._into_real and isinstance(tensor, FakeTensor):
            return  # stands for a real tensor, which is counted as such
        self._shape = tuple(tensor.shape), tensor.dtype
        super()._see(tensor, category, made_by, new)

    def _born(self, storage: torch.UntypedStorage, category: int, made_by: str) -> None:
        index = len(self.storage_trace.bytes)
        self.origins[index] = (self.code.origin(), *self._shape)
        super()._born(storage, category, made_by)
        self._count(index, self.storage_trace.bytes[index])

    def _copy(self, operands: list[torch.Tensor]) -> None:
        first = len(self.storage_trace.bytes)
        for index, operand in enumerate(operands, first):
            self.origins[index] = (self.code.origin(), tuple(operand.shape), operand.dtype)
        super()._copy(operands)
        copied = sum(self.storage_trace.bytes[first:])
        self._most_bytes = [
            max(most, alive + copied) for most, alive in zip(self._most_bytes, self._alive_bytes)
        ]

    def _forget(self, key: int, index: int | None = None) -> None:
        before = len(self.storage_trace.events)
        super()._forget(key, index)
        for event in self.storage_trace.events[before:]:
            self._count(event[1], -self.storage_trace.bytes[event[1]])

    def _count(self, index: int, number: int) -> None:
        for place in (0,) if index in self.host else (0, 1):
            self._alive_bytes[place] += number
            self._most_bytes[place] = max(self._most_bytes[place], self._alive_bytes[place])

    def held(self) -> tuple[int, int]:
        """(bytes alive, most bytes alive since `forget_most`); those of the GPU, once named."""
        place = int(self.places.named)
        return self._alive_bytes[place], self._most_bytes[place]

    def forget_most(self) -> None:
        """Count the most bytes from here on."""
        self._most_bytes = list(self._alive_bytes)

    def name_parameters(self, modules: Iterable[nn.Module]) -> None:
        """What modules hold is parameters, and what their gradients will be is gradients."""
        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None and self._known(parameter):
                    self.whole[self.number_of(parameter)] = parameter.numel()
            scales = state_of(module)
            held: list[Any] = [*module._parameters.values(), *module._buffers.values(), *scales]
            for tensor in held:
                if tensor is not None and self._known(tensor):
                    self._see(tensor, PARAMETERS, "given")
            weight: Any = getattr(module, "weight", None)
            packed = getattr(weight, "quant_state", None)
            if packed is not None:
                self.elements[self._index(weight)] = packed.shape.numel()
            self.elements |= {self._index(tensor): 0 for tensor in scales}

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Name the gradients of these parameters once they are complete, from now on."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                self._handles.append(
                    parameter.register_post_accumulate_grad_hook(
                        lambda p: self._see(p.grad, GRADIENTS, "gradient")
                    )
                )
            if parameter.grad is not None and self._known(parameter.grad):
                self._see(parameter.grad, GRADIENTS, "gradient")

    def name_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        """What these tensors hold is gradients."""
        for tensor in tensors:
            if self._known(tensor):
                self._see(tensor, GRADIENTS, "gradient")

    def name_states(self, optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer keeps is optimizer states."""
        for state in optimizer.state.values():
            for tensor in tree_leaves(state):
                if isinstance(tensor, torch.Tensor) and self._known(tensor):
                    self._see(tensor, OPTIMIZER, "state")

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of the storage that a tensor is of."""
        return self._index(plain(tensor))

    def _known(self, tensor: torch.Tensor) -> bool:
        return self._index(plain(tensor)) >= 0


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that ranks share; another tensor as it is."""
    while isinstance(tensor, WRAPPERS):
        tensor = inside(tensor)
    return tensor


def _writes_to_real(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation's only result is a real tensor that it writes to, with a fake operand.

    Then what it returns is a fake tensor with memory of its own, that a real run does not take.
    """
    returns = function._schema.returns
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return False
    written = [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name in written_arguments(function)
    ]
    return any(
        isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        for leaf in tree_leaves(written)
    )

"""Which layers of a model repeat, and a step in which only a few of them run.

A trace of such a step takes a fraction of the time, and `splice.whole` makes the trace of the whole
step from it, equal to the byte. All layers keep their parameters and optimizer states; those that
do not run get gradients without a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tight_fit.torch_private import in_backward, storage_key
from tight_fit.trace import splice
from tight_fit.trace.splice import Mark, NotAlike
from tight_fit.trace.storage_trace import GRADIENTS, StorageTrace
from tight_fit.trace.tracker import Tracker

SCALARS = (bool, int, float, str, type(None), tuple, torch.dtype, type)
NUMBERS_OF_LAYERS = {"layer_idx", "layer_id", "layer_index", "layer_number"}  # as libraries call it
LONGEST_PERIOD = 8  # layers


class Stack(NamedTuple):
    """A list of layers that repeat.

    first   index of the first layer of the first of the two blocks that are compared
    period  layers of a block
    after   layers that run after the two blocks, at least
    """

    layers: nn.ModuleList | nn.Sequential
    first: int
    period: int
    after: int = 1

    @property
    def left_out(self) -> int:
        """Number of blocks that need not run."""
        count = len(self.layers._modules)
        return (count - self.first - 2 * self.period - self.after) // self.period

    @property
    def kept(self) -> list[int]:
        """Indices of the layers that run."""
        begin = self.first + 2 * self.period
        rest = range(begin + self.left_out * self.period, len(self.layers._modules))
        return [*range(begin), *rest]

    def pairs(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """(layer that does not run, the layer of the second block that stands for it)."""
        layers, begin = list(self.layers._modules.values()), self.first + self.period
        for index in range(begin + self.period, begin + self.period * (self.left_out + 1)):
            yield layers[index], layers[begin + (index - begin) % self.period]


def layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers of a model in order: the elements of its outermost lists of modules.

    Raises ValueError for a model that has none.
    """
    found: list[nn.Module] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(inside or (" ",)):
            inside += (f"{name}.",)
            found += [layer for layer in module if any(True for _ in layer.parameters())]
    if not found:
        raise ValueError(
            "This model has no list of layers, each of which could be wrapped or compiled: leave "
            "the layout or compile out."
        )
    return found


class RepeatedLayers:
    """The repeated layers of a model, and one step of it in which only some of them run.

    after  layers that run after the two blocks that are compared. With FSDP2 it takes two: the
           first layer of the backward pass has no message before it to wait for
    """

    def __init__(self, model: nn.Module, after: int = 1):
        self.stacks = stacks_of(model, after)
        self.parameters = list(model.parameters())
        self.marks: list[Mark] = []
        self.stand_ins: list[int] = []

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, layers that repeat do not run."""
        before = [type(stack.layers) for stack in self.stacks]
        for stack in self.stacks:
            stack.layers.__class__ = _shortened(type(stack.layers), stack.kept)
        try:
            yield
        finally:
            for stack, kind in zip(self.stacks, before):
                stack.layers.__class__ = kind

    @contextmanager
    def left_out(self, tracker: Tracker) -> Iterator[None]:
        """Inside, layers that repeat do not run; the tracker is told where blocks begin."""
        handles = []
        tracker.joined = []
        for number, stack in enumerate(self.stacks):
            layers = list(stack.layers._modules.values())
            for edge in range(3):
                layer = layers[stack.kept[stack.first + edge * stack.period]]
                hook = _Edge(self, tracker, number, edge)
                handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            with self.shortened():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def mark(self, tracker: Tracker, stack: int, edge: int) -> None:
        """Note that the step is at an edge of a block."""
        recorder = tracker.recorder
        operations = len(recorder.traced.order) if recorder else 0
        tracker.mark(len(self.marks))
        self.marks.append(Mark(stack, edge, operations, dict(tracker.storage_trace.flops)))

    def add_gradients(self, tracker: Tracker) -> None:
        """Give the layers that did not run the gradients that the others have."""
        absent: list[nn.Parameter] = []
        with tracker.paused():
            self._check_apart()
        for stack in self.stacks:
            for layer, other in stack.pairs():
                for parameter, like in zip(layer.parameters(), other.parameters()):
                    if like.grad is not None:
                        absent.append(parameter)
        with tracker.paused():
            gradients = give_gradients(absent)
        for gradient in gradients:
            self.stand_ins.append(len(tracker.storage_trace.bytes))
            tracker.adopt(gradient, GRADIENTS)

    def _check_apart(self) -> None:
        """Raises NotAlike where a layer's gradients share their memory with what is outside of it.

        Within a layer they may, as the shards that one message brings do.
        """
        layer_of = {
            id(parameter): (number, index)
            for number, stack in enumerate(self.stacks)
            for index, layer in enumerate(stack.layers._modules.values())
            for parameter in layer.parameters()
        }
        owners: dict[int, tuple[int, int] | None] = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                part = parameter.grad
                part = part.to_local() if isinstance(part, DTensor) else part
                owner = layer_of.get(id(parameter))
                if owners.setdefault(storage_key(part.untyped_storage()), owner) != owner:
                    raise NotAlike("Gradients share their memory.")

    def whole(self, tracker: Tracker) -> tuple[StorageTrace, list[tuple[int, int]]]:
        """The trace with all layers, as `splice.whole`. Raises NotAlike."""
        left_out = [stack.left_out for stack in self.stacks]
        joined = tracker.joined or []
        return splice.whole(tracker.storage_trace, self.marks, left_out, self.stand_ins, joined)


def give_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Give all that trains a gradient without values, those of one shape the same; and the list."""
    given: dict[tuple, torch.Tensor] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kind = kind_of(parameter)
            if kind not in given:
                given[kind] = torch.zeros_like(parameter)
            parameter.grad = given[kind]
    return list(given.values())


class _Edge:
    """A hook before a layer that begins a block, in the forward pass and when its gradient is due.

    The layer's input is the first tensor given to it that needs a gradient. Its gradient is due
    when the whole layer's backward pass has run.
    """

    def __init__(self, layers: RepeatedLayers, tracker: Tracker, stack: int, edge: int):
        self.layers, self.at = layers, (tracker, stack, edge)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if in_backward() or not torch.is_grad_enabled():  # recomputed, or a reference
            return
        self.layers.mark(*self.at)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(lambda gradients: self.layers.mark(*self.at))
                return
        raise NotAlike("No gradient is due before a layer.")


def _shortened(kind: type, kept: list[int]) -> type:
    """A class of lists of modules in whose forward pass only the layers at `kept` are there.

    Without gradients all are, as in the pass of a reference model or while text is written.
    """

    class Shortened(kind):
        def __len__(self):
            return len(kept) if torch.is_grad_enabled() else len(self._modules)

        def __iter__(self):
            modules = list(self._modules.values())
            there = kept if torch.is_grad_enabled() else range(len(modules))
            return iter([modules[index] for index in there])

        def __getitem__(self, index):
            return list(self)[index]

    return Shortened


def stacks_of(model: nn.Module, after: int = 1) -> list[Stack]:
    """The lists of layers of a model that repeat, those inside of such a list left out."""
    found: list[Stack] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or name.startswith(inside):
            continue
        stack = _stack(module, _lists(model, len(module)), after)
        if stack is not None:
            found.append(stack)
            inside += (f"{name}.",)
    return found


def _stack(layers: nn.ModuleList | nn.Sequential, lists: list[list], after: int) -> Stack | None:
    """How a list of layers repeats, None where it does not or is too short."""
    if len(layers) < 5:
        return None
    alike = [
        (signature(layer), [repr(values[index]) for values in lists])
        for index, layer in enumerate(layers)
    ]
    best = None
    for period in range(1, min(LONGEST_PERIOD, len(layers) // 3) + 1):
        begin = len(layers) - period
        while begin > 0 and alike[begin - 1] == alike[begin - 1 + period]:
            begin -= 1
        stack = Stack(layers, begin + period, period, after)
        if stack.left_out > 0 and (best is None or len(stack.kept) < len(best.kept)):
            best = stack
    return best


def signature(layer: nn.Module) -> list:
    """What decides which operations a layer runs: equal for two layers that run the same ones."""
    return [
        (
            name,
            type(module),
            {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, SCALARS) and key not in NUMBERS_OF_LAYERS
            },
            [
                (key, None if tensor is None else kind_of(tensor))
                for table in (module._parameters, module._buffers)
                for key, tensor in table.items()
            ],
        )
        for name, module in layer.named_modules()
    ]


def kind_of(tensor: torch.Tensor) -> tuple:
    """What of a tensor decides which operations run on it."""
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, placements


def _lists(model: nn.Module, length: int) -> list[list]:
    """The lists in a model's configuration that have an entry for each of so many layers."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "__dict__"):
            configs[id(config)] = config
    return [
        value
        for config in configs.values()
        for value in vars(config).values()
        if isinstance(value, list) and len(value) == length
    ]

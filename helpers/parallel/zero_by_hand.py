"""ZeRO's three stages by hand (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054), over counted messages.

N ranks train one model on N shares of the rows. A parameter is needed whole only while its layer computes, its gradient
only until it is summed up, Adam's states only by whoever updates it. So each rank is in charge of one N-th:

    stage  every rank holds                a step sends, a rank (S: bytes of the parameters; all times (N-1)/N)
    0      all, as DDP                     all-reduce of the gradients: 2 S
    1      its part of the states          reduce-scatter of the gradients, all-gather of the parameters: 2 S
    2      and its part of the gradients   the same, but the reduce-scatter after every micro-batch: 2 S
    3      and its part of the parameters  all-gather before each layer's forward, again before its backward,
                                           reduce-scatter after it: 3 S

The optimizer must treat each number by itself, as Adam and SGD do; LAMB and Adafactor look at whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from helpers.parallel.collectives import (
    chunks,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from helpers.parallel.transport import Transport
from helpers.torch_private import storage_key

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Moment(NamedTuple):
    """What a rank held after an event: "gather", "forward", "backward", "reduce", "drop" of a unit (None: the whole
    model), "update". Bytes."""

    event: str
    unit: int | None
    parameters: int
    gradients: int


class Unit:
    """A layer, or several: what is gathered and dropped together. Its parameters become views of one flat tensor, which
    is cut in N pieces whose lengths differ by at most one; this rank owns piece number `mine`.

    owned     what the optimizer sees: in stage 0 the flat tensor, in 1 and 2 a view of the own piece, in 3 all there is
    gradient  what has been summed up so far: whole in stages 0 and 1, the own piece in 2 and 3
    """

    def __init__(self, module: nn.Module, transport: Transport, stage: int):
        self.module, self.transport, self.stage = module, transport, stage
        self.parameters = list(module.parameters())
        if len({parameter.dtype for parameter in self.parameters}) != 1:
            raise ValueError(
                "A unit needs parameters, all of one dtype: join a layer without any to its neighbour."
            )
        self.flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        for parameter, view in zip(
            self.parameters, self.flat.split([p.numel() for p in self.parameters])
        ):
            parameter.data = view.view(parameter.shape)
        self.pieces = chunks(self.flat, transport.ranks)
        self.mine = (
            transport.rank + 1
        ) % transport.ranks  # where the ring leaves a rank its finished piece
        own = self.flat if stage == 0 else self.pieces[self.mine]
        self.owned = nn.Parameter(own.clone() if stage == 3 else own)
        self.gradient: Tensor | None = None
        self.drop()

    def gather(self) -> None:
        """All parameters whole, from the ranks' pieces."""
        if self.stage == 3:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
        given = [
            self.owned.detach() if place == self.mine else piece
            for place, piece in enumerate(self.pieces)
        ]
        for piece, whole in zip(self.pieces, ring_all_gather(self.transport, given)):
            piece.copy_(whole)

    def drop(self) -> None:
        """Stage 3: give the memory back. What autograd has saved looks at the same storage, to be filled again in time."""
        if self.stage == 3:
            self.flat.untyped_storage().resize_(0)

    def take(self) -> None:
        """Add up the gradient that a backward pass has left; from stage 2 on, over all ranks, keeping the own piece."""
        found = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters]
        )
        for parameter in self.parameters:
            parameter.grad = None
        if self.stage >= 2:
            found = ring_reduce_scatter(self.transport, found)[self.mine]
        self.gradient = found if self.gradient is None else self.gradient.add_(found)

    def finish(self) -> None:
        """Give the optimizer the sum over all micro-batches and ranks, of what this rank owns."""
        if self.stage == 0:
            self.gradient = ring_all_reduce(self.transport, self.gradient)
        if self.stage == 1:
            self.gradient = ring_reduce_scatter(self.transport, self.gradient)[self.mine]
        self.owned.grad, self.gradient = self.gradient, None


class Zero:
    """One rank of a data-parallel training with ZeRO.

    units      the model's layers in their order: modules with one input and one output, each with parameters of its own;
               they are changed in place, and must be equal on all ranks
    stage      0 to 3
    optimizer  makes it from a list of parameters, which are one-dimensional
    moments    what was held after each event of the last step
    Raises ValueError for another stage, or a unit without parameters.
    """

    def __init__(
        self,
        transport: Transport,
        units: Sequence[nn.Module],
        stage: int,
        optimizer: Optimizer = torch.optim.AdamW,
    ):
        if stage not in (0, 1, 2, 3):
            raise ValueError(
                f"stage={stage!r} is not known: ZeRO has stages 1, 2 and 3; 0 shares nothing."
            )
        self.transport, self.stage = transport, stage
        self.units = [Unit(module, transport, stage) for module in units]
        self.optimizer = optimizer([unit.owned for unit in self.units])
        self.moments: list[Moment] = []

    def step(
        self,
        micro_batches: Iterable[tuple[Tensor, Tensor]],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> float:
        """One optimizer step on this rank's (inputs, targets). `loss(outputs, targets)` is a sum over their rows divided
        by the rows of the whole step, over all micro-batches and ranks. Returns this rank's share of the loss."""
        self.moments, total = [], 0.0
        for inputs, targets in micro_batches:
            kept, value = [], inputs
            for (
                unit
            ) in self.units:  # each unit's graph by itself: so we know when its backward pass is
                value = value.detach().requires_grad_(value.is_floating_point())
                kept.append((value, self._forward(unit, value)))
                value = kept[-1][1]
            value = value.detach().requires_grad_()
            share = loss(value, targets)
            share.backward()
            gradient, total = value.grad, total + share.item()
            while kept:
                value, output = kept.pop()
                self._backward(self.units[len(kept)], output, gradient)
                gradient = value.grad
        for unit in self.units:
            unit.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.stage in (1, 2):
            for unit in self.units:
                unit.gather()
        self._note("update", None)
        return total

    def _forward(self, unit: Unit, value: Tensor) -> Tensor:
        if self.stage == 3:
            unit.gather()
            self._note("gather", unit)
        output = unit.module(value)
        self._note("forward", unit)
        self._drop(unit)
        return output

    def _backward(self, unit: Unit, output: Tensor, gradient: Tensor) -> None:
        if self.stage == 3:
            unit.gather()
            self._note("gather", unit)
        output.backward(gradient)
        self._note("backward", unit)
        unit.take()
        self._note("reduce", unit)
        self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        if self.stage == 3:
            unit.drop()
            self._note("drop", unit)

    def _note(self, event: str, unit: Unit | None) -> None:
        held = self.held()
        self.moments.append(
            Moment(
                event,
                None if unit is None else self.units.index(unit),
                held["parameters"],
                held["gradients"],
            )
        )

    def held(self) -> dict[str, int]:
        """Bytes of this rank now, counted by storages: {"parameters", "gradients", "optimizer states"}."""
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if value.dim()
        ]
        gradients = [unit.gradient for unit in self.units] + [
            unit.owned.grad for unit in self.units
        ]
        gradients += [parameter.grad for unit in self.units for parameter in unit.parameters]
        return {
            "parameters": _bytes(
                [tensor for unit in self.units for tensor in (unit.flat, unit.owned)]
            ),
            "gradients": _bytes(gradients),
            "optimizer states": _bytes(states),
        }

    def weights(self) -> Tensor:
        """All parameters, flat, on every rank: in stage 3 gathered for it, which sends S (N-1)/N bytes."""
        found = []
        for unit in self.units:
            if self.stage == 3:
                unit.gather()
            found.append(unit.flat.clone())
            unit.drop()
        return torch.cat(found)


def states_bytes(length: int, ranks: int, stage: int, itemsize: int = 4) -> dict[str, float]:
    """The paper's formula: bytes a rank of `length` parameters, their gradients and Adam's two states, all alike in dtype."""
    since = {"parameters": 3, "gradients": 2, "optimizer states": 1}
    return {
        kind: itemsize
        * length
        * (1 + (kind == "optimizer states"))
        / (ranks if stage >= first else 1)
        for kind, first in since.items()
    }


def sent_bytes(
    length: int, ranks: int, stage: int, micro_batches: int = 1, itemsize: int = 4
) -> float:
    """Bytes that a rank sends in a step, by the formula; over all ranks it is exact for any length."""
    times = {0: 2, 1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]
    return times * itemsize * length * (ranks - 1) / ranks


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    storages = {
        storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())

"""ZeRO's three stages by hand (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

N ranks train one model, each on its part of the examples. A parameter is needed whole only while
its layer computes, its gradient only until it is summed over the ranks, and Adam's states only by
whoever updates the parameter. So each rank owns one N-th of them:

    stage  every rank holds                  what a rank sends per step, with one micro-batch
    0      everything, as DDP                all-reduce of the gradients: 2 S
    1      its shard of the states           reduce-scatter of the gradients, all-gather of the
                                             parameters: 2 S
    2      and its shard of the gradients    the same, but a reduce-scatter after every micro-batch:
                                             2 S
    3      and its shard of the parameters   all-gather before each layer's forward pass and again
                                             before its backward pass, reduce-scatter after it: 3 S

S are the bytes of the parameters; all of this times (N-1)/N. The optimizer must treat each number
by itself, as Adam and SGD do; LAMB and Adafactor look at whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from by_hand.collectives import chunks, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from by_hand.transport import Transport
from tight_fit.torch_private import storage_key

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Moment(NamedTuple):
    """Bytes of parameters and gradients that a rank held after an event.

    event  "gather", "forward", "backward", "reduce" or "drop" of a unit, or "update"
    unit   its number; None for the whole model
    """

    event: str
    unit: int | None
    parameters: int
    gradients: int


class Unit:
    """A layer, or several: what is gathered and dropped together.

    Its parameters become views of one flat tensor, which is cut into N pieces whose lengths differ
    by at most one; this rank owns piece number `own`.

    owned     what the optimizer sees: in stage 0 the flat tensor, in 1 and 2 a view of the own
              piece, in 3 a tensor of its own with the values of the own piece
    gradient  the sum so far: whole in stages 0 and 1, the own piece in 2 and 3; None before the
              first backward pass
    Raises ValueError for a module without parameters, or with parameters of several dtypes.
    """

    def __init__(self, module: nn.Module, transport: Transport, stage: int):
        self.module, self.transport, self.stage = module, transport, stage
        self.parameters = list(module.parameters())
        if len({parameter.dtype for parameter in self.parameters}) != 1:
            raise ValueError(
                "A unit needs parameters, all of one dtype: join a layer without any to its "
                "neighbour."
            )
        self.flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        views = self.flat.split([parameter.numel() for parameter in self.parameters])
        for parameter, view in zip(self.parameters, views):
            parameter.data = view.view(parameter.shape)
        self.pieces = chunks(self.flat, transport.ranks)
        self.own = (transport.rank + 1) % transport.ranks  # the piece that the ring completes here
        owned = self.flat if stage == 0 else self.pieces[self.own]
        self.owned = nn.Parameter(owned.clone() if stage == 3 else owned)
        self.gradient: Tensor | None = None
        self.drop()

    def gather(self) -> None:
        """Make all parameters whole again, from the pieces of all ranks."""
        if self.stage == 3:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
        pieces = list(self.pieces)
        pieces[self.own] = self.owned.detach()
        for piece, gathered in zip(self.pieces, ring_all_gather(self.transport, pieces)):
            piece.copy_(gathered)

    def drop(self) -> None:
        """In stage 3 give back the memory of the whole parameters.

        Tensors that autograd has saved keep the same storage, which `gather` fills again in time.
        """
        if self.stage == 3:
            self.flat.untyped_storage().resize_(0)

    def accumulate(self) -> None:
        """Add the gradient of a backward pass to `gradient`, and clear it.

        From stage 2 on it is summed over all ranks first, and only the own piece is kept.
        """
        gradient = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters]
        )
        for parameter in self.parameters:
            parameter.grad = None
        if self.stage >= 2:
            gradient = ring_reduce_scatter(self.transport, gradient)[self.own]
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def finish(self) -> None:
        """Hand the optimizer the gradient of what this rank owns, summed over ranks and batches."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None, "a step needs at least one micro-batch"
        if self.stage == 0:
            gradient = ring_all_reduce(self.transport, gradient)
        if self.stage == 1:
            gradient = ring_reduce_scatter(self.transport, gradient)[self.own]
        self.owned.grad = gradient


class Zero:
    """One rank of a data-parallel training with ZeRO.

    units      the model's layers in their order: modules with one input and one output, each with
               parameters of its own; they are changed in place, and must be equal on all ranks
    stage      0 to 3
    optimizer  makes the optimizer from a list of one-dimensional parameters
    moments    what was held after each event of the last step
    Raises ValueError for another stage, or for a unit without parameters.
    """

    def __init__(
        self,
        transport: Transport,
        units: Sequence[nn.Module],
        stage: int,
        optimizer: MakeOptimizer = torch.optim.AdamW,
    ):
        if stage not in (0, 1, 2, 3):
            raise ValueError(
                f"stage={stage!r} is not known: use ZeRO's stage 1, 2 or 3, or 0 to shard nothing."
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
        """One optimizer step on this rank's micro-batches of (inputs, targets).

        `loss(outputs, targets)` must be a sum over examples, divided by the examples of the whole
        step, of all micro-batches and ranks. Returns this rank's part of the mean loss: the sum
        over the ranks is the loss.
        """
        self.moments, total = [], 0.0
        for inputs, targets in micro_batches:
            passed, value = [], inputs
            # Each unit has a graph of its own, so that we know when its backward pass is done.
            for unit in self.units:
                value = value.detach().requires_grad_(value.is_floating_point())
                passed.append((value, self._forward(unit, value)))
                value = passed[-1][1]
            value = value.detach().requires_grad_()
            part = loss(value, targets)
            part.backward()
            gradient, total = value.grad, total + part.item()
            while passed:
                value, output = passed.pop()
                self._backward(self.units[len(passed)], output, gradient)
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

    def _backward(self, unit: Unit, output: Tensor, gradient: Tensor | None) -> None:
        if self.stage == 3:
            unit.gather()
            self._note("gather", unit)
        output.backward(gradient)
        self._note("backward", unit)
        unit.accumulate()
        self._note("reduce", unit)
        self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        if self.stage == 3:
            unit.drop()
            self._note("drop", unit)

    def _note(self, event: str, unit: Unit | None) -> None:
        held = self.held()
        number = None if unit is None else self.units.index(unit)
        self.moments.append(Moment(event, number, held["parameters"], held["gradients"]))

    def held(self) -> dict[str, int]:
        """Bytes that this rank holds now: {"parameters", "gradients", "optimizer states"}.

        Each storage counts once, however many tensors are views of it.
        """
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if value.dim()
        ]
        parameters = [tensor for unit in self.units for tensor in (unit.flat, unit.owned)]
        gradients = [tensor for unit in self.units for tensor in (unit.gradient, unit.owned.grad)]
        gradients += [parameter.grad for unit in self.units for parameter in unit.parameters]
        return {
            "parameters": _bytes(parameters),
            "gradients": _bytes(gradients),
            "optimizer states": _bytes(states),
        }

    def weights(self) -> Tensor:
        """All parameters in one flat tensor, on every rank.

        In stage 3 they are gathered for it, which sends S (N-1)/N bytes.
        """
        copies = []
        for unit in self.units:
            if self.stage == 3:
                unit.gather()
            copies.append(unit.flat.clone())
            unit.drop()
        return torch.cat(copies)


def states_bytes(length: int, ranks: int, stage: int, itemsize: int = 4) -> dict[str, float]:
    """The paper's formula for the bytes that a rank holds between steps, and its gradients' bytes.

    length    number of parameters; Adam has two states for each
    itemsize  bytes of a number, the same for parameters, gradients and states
    Returns {"parameters", "gradients", "optimizer states"}.
    """
    sharded_from = {"parameters": 3, "gradients": 2, "optimizer states": 1}
    numbers = {"parameters": 1, "gradients": 1, "optimizer states": 2}
    return {
        kind: itemsize * length * numbers[kind] / (ranks if stage >= first else 1)
        for kind, first in sharded_from.items()
    }


def sent_bytes(
    length: int, ranks: int, stage: int, micro_batches: int = 1, itemsize: int = 4
) -> float:
    """Bytes that a rank sends per step, by the formula.

    A rank's own bytes may differ by the odd number of each piece; those of all ranks do not.
    """
    times = {0: 2, 1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]
    return times * itemsize * length * (ranks - 1) / ranks


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    storages = {
        storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())

"""What a compiled step keeps for its backward pass: planned, and measured.

`torch.compile` takes the graph of forward and backward pass together and cuts it in two. What
crosses the cut is kept in memory. Its partitioner looks for the cheapest cut (a minimum cut) among
those in which everything that is cheap to compute again, such as an addition or a cast, may be
computed again inside the kernel that needs it (Horace He and others, functorch's min-cut
rematerialization). Without compiling, each operation keeps what its own formula needs.

The plan runs the partitioner, on tensors without values, and makes no code. What inductor changes
afterwards it does not see: it may copy a weight into another layout, which is then kept as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from tight_fit.models import made
from tight_fit.models.made import FlatLogits
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import batch
from tight_fit.techniques.model_changes import as_if_real
from tight_fit.techniques.step import loss_sum
from tight_fit.torch_private import inductor, one_by_one, storage_key
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues


@dataclass(frozen=True)
class KeptForBackward:
    """Bytes that are kept from the forward to the backward pass, beside the weights.

    eager     operation by operation
    compiled  by torch.compile's cut
    graphs    into which the forward pass was compiled; more than one means that it broke
    """

    eager: int
    compiled: int
    graphs: int

    @property
    def saved(self) -> float:
        """The share that compiling saves; negative where it keeps more."""
        return 1 - self.compiled / self.eager


def plan_compiled(step: ModelStep) -> KeptForBackward:
    """Plan what one micro-batch of a step keeps, with and without torch.compile; runs nothing.

    The kernels are those of a CPU. Raises what `plans.model.plan_model` raises.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        with FakeValues():
            model = made.empty(step)
        return _both(model, step, _as_if_with_values, code=False)


def measure_compiled(step: ModelStep) -> KeptForBackward:
    """The same on real tensors of this machine's CPU, by code that inductor makes now.

    Takes up to a minute, and a C++ compiler.
    """
    model = made.prepare(made.make(step), step)
    return _both(model, step, nullcontext, code=True)


@contextmanager
def _as_if_with_values() -> Iterator[None]:
    with FakeValues(), as_if_real():
        yield


def _both(
    model: FlatLogits, step: ModelStep, values: Callable[[], AbstractContextManager], code: bool
) -> KeptForBackward:
    graphs: list[torch.fx.GraphModule] = []
    with values():
        eager = kept_bytes(model, step)
    torch.compiler.reset()  # what was compiled before does not count
    model.compile(backend=inductor(graphs.append, None if code else one_by_one))
    try:
        return KeptForBackward(eager, kept_bytes(model, step), len(graphs))
    finally:
        torch.compiler.reset()


def kept_bytes(model: FlatLogits, step: ModelStep) -> int:
    """Bytes that one micro-batch keeps for its backward pass, weights and buffers left out."""
    inputs = batch(model, step)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[storage_key(tensor.untyped_storage())] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_sum(model, inputs, step)
    own = {storage_key(part.untyped_storage()) for part in (*model.parameters(), *model.buffers())}
    return sum(part.untyped_storage().nbytes() for key, part in kept.items() if key not in own)

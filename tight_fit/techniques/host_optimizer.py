"""An optimizer whose states lie in the host's memory, and whose update the CPU computes.

ZeRO-Offload (Ren et al. 2021, https://arxiv.org/abs/2101.06840) on one GPU: gradients go to the
host, the CPU updates a copy of the weights there, and the weights come back. The GPU holds weights
and gradients, and no states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tight_fit.techniques.host import FROM_HOST, TO_HOST, on_host, tell_of_wait


class HostOptimizer(torch.optim.Optimizer):
    """`make` gives the optimizer of copies of `trained` in the host's memory.

    Its settings, such as the learning rate, are those of this one's `param_groups`. `state` has the
    states of each of `trained`, which stay in the host's memory.
    """

    def __init__(
        self,
        trained: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ):
        self.pairs = [(parameter, _copy(parameter)) for parameter in trained]
        self.versions = [parameter._version for parameter, _ in self.pairs]
        self.inner = make([copy for _, copy in self.pairs])
        super().__init__([parameter for parameter, _ in self.pairs], dict(self.inner.defaults))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss is returned
        """One update of all parameters that have a gradient."""
        for mine, theirs in zip(self.param_groups, self.inner.param_groups):
            theirs.update({name: value for name, value in mine.items() if name != "params"})
        given = [
            (place, parameter, copy, parameter.grad)
            for place, (parameter, copy) in enumerate(self.pairs)
            if parameter.grad is not None
        ]
        for place, parameter, copy, gradient in given:
            if parameter._version != self.versions[place]:  # somebody has loaded weights
                with on_host():
                    copy.copy_(parameter)
            there = self.state.get(parameter, {})
            if there and there is not self.inner.state.get(copy):  # somebody has loaded states
                self.inner.state[copy] = {name: _on_cpu(value) for name, value in there.items()}
            with on_host():
                # PyTorch keeps memory that was pinned, and gives it out again in the next step.
                pinned = torch.empty_like(copy, pin_memory=gradient.is_cuda)
                copy.grad = pinned.copy_(gradient, non_blocking=True)
        tell_of_wait(TO_HOST)
        for device in {gradient.device for *_, gradient in given if gradient.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the CPU reads what has arrived
        with on_host():
            self.inner.step()
        for place, parameter, copy, _ in given:
            parameter.copy_(copy)
            self.versions[place] = parameter._version
            self.state[parameter] = self.inner.state[copy]
            copy.grad = None
        tell_of_wait(FROM_HOST)

    def in_host_memory(self) -> list[torch.Tensor]:
        """The copies of the weights and the states."""
        kept: list[Any] = [copy for _, copy in self.pairs]
        kept += [value for state in self.inner.state.values() for value in state.values()]
        return [value for value in kept if isinstance(value, torch.Tensor)]


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    with on_host():
        copy = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
        return nn.Parameter(copy.copy_(parameter.detach()))


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value

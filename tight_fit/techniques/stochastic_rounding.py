"""AdamW for weights in bf16, rounded up or down at random, so that small updates are not lost.

A bf16 number has 8 significant bits: 1 plus an update of less than 1/256 rounds back to 1. Rounded
stochastically (Gupta et al. 2015, https://arxiv.org/abs/1502.02551) it becomes the next number with
the probability that the update deserves, so that the mean of many updates is right. The states are
rounded in the same way: the second moment changes by a thousandth a step, which bf16 would lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

CHUNK = 2**22  # elements that are updated at once, which bounds the fp32 copies


def rounded(values: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, each to one of its two neighbours, with the exact value as the mean.

    The 16 bits that bf16 lacks get a random number added to them, and what is carried decides.
    Infinite values and NaN stay what they are.
    """
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device)
    return (values.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2017) with weights, gradients and both states in bf16.

    Each is computed in fp32, `CHUNK` elements at a time, and rounded by `rounded`. Raises
    ValueError for parameters of another dtype.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype != torch.bfloat16:
                    raise ValueError(
                        f"Stochastic rounding is for weights in bf16, and one is {parameter.dtype}:"
                        " store the weights in bf16, or use another optimizer."
                    )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss is returned
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
                if not all(tensor.is_contiguous() for tensor in tensors):
                    _update(tensors, state["step"], group)
                    continue
                flat = [tensor.view(-1) for tensor in tensors]
                for begin in range(0, parameter.numel(), CHUNK):
                    part = slice(begin, begin + CHUNK)
                    _update([tensor[part] for tensor in flat], state["step"], group)


def _update(tensors: Sequence[torch.Tensor], step: int, group: dict[str, Any]) -> None:
    weight, gradient, first, second = tensors
    (decay_1, decay_2), rate = group["betas"], group["lr"]
    g = gradient.float()
    m = first.float().lerp_(g, 1 - decay_1)
    v = second.float().mul_(decay_2).addcmul_(g, g, value=1 - decay_2)
    del g
    first.copy_(rounded(m))
    second.copy_(rounded(v))
    w = weight.float().mul_(1 - rate * group["weight_decay"])
    scale = v.div_(1 - decay_2**step).sqrt_().add_(group["eps"])
    weight.copy_(rounded(w.addcdiv_(m, scale, value=-rate / (1 - decay_1**step))))

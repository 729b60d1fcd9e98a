"""AdamW with 8-bit states in which zero stays zero, as on a GPU, on any device.

bitsandbytes' kernel for CPUs stores zero as a tiny number, so that it does not show what zeros in
the second moments do (lab of notebook 05).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

BLOCK = 256
DROPPED = 11  # lowest bits of an fp32 number, which hardly matter for its nearest level
SMALLEST = 4096  # elements: bitsandbytes keeps the states of smaller tensors in 32 bits


class RoundedAdamW(torch.optim.Optimizer):
    """Dettmers et al. 2021, https://arxiv.org/abs/2110.02861: AdamW, and both states rounded.

    After each step every element becomes the nearest of the dynamic map's 256 values, times the
    largest of its block of 256. The states are held as the fp32 numbers that the bytes stand for.
    Those of tensors under 4,096 elements stay as they are.
    """

    def __init__(self, params, lr: float, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8):
        from bitsandbytes.functional import create_dynamic_map

        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "t": 0}
        super().__init__(params, defaults)
        signs = {"mean": True, "square": False}
        self.maps = {
            name: nearest_levels(create_dynamic_map(signed=sign)) for name, sign in signs.items()
        }

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["t"] += 1
            (beta1, beta2), t = group["betas"], group["t"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state |= {name: torch.zeros_like(weight) for name in self.maps}
                mean = state["mean"].mul_(beta1).add_(weight.grad, alpha=1 - beta1)
                square = state["square"].mul_(beta2)
                square.addcmul_(weight.grad, weight.grad, value=1 - beta2)
                deviation = (square / (1 - beta2**t)).sqrt_().add_(group["eps"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.addcdiv_(mean, deviation, value=-group["lr"] / (1 - beta1**t))
                if weight.numel() >= SMALLEST:
                    for name, nearest in self.maps.items():
                        state[name] = rounded(state[name], nearest)


def rounded(values: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """What is read after `values` were stored with a scale per block.

    nearest  `nearest_levels` of the map
    """
    blocks = F.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    bits = (blocks / scale.clamp(min=1e-38)).view(torch.int32) >> DROPPED
    levels = nearest.index_select(0, (bits + len(nearest) // 2).flatten()).view_as(blocks)
    return (levels * scale).flatten()[: values.numel()].view_as(values)


def nearest_levels(levels: torch.Tensor) -> torch.Tensor:
    """The nearest of the sorted `levels` for the upper bits of every fp32 number.

    Looking it up is ten times as fast as a search.
    """
    half = 2 ** (31 - DROPPED)
    bits = (torch.arange(-half, half, dtype=torch.int32) << DROPPED) + 2 ** (DROPPED - 1)
    numbers = bits.view(torch.float32)
    return levels[torch.bucketize(numbers, (levels[:-1] + levels[1:]) / 2).clamp(max=255)]

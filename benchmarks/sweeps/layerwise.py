"""LARS and LAMB as their papers have them: the length of each tensor's step follows its weights.

bitsandbytes' optimizers of these names shorten steps only and are other methods (notebook 17).
"""

from __future__ import annotations

import torch

LIMIT = 10.0  # on the norm of the weights, as in the first version of the LAMB paper


class Lars(torch.optim.Optimizer):
    """You et al. 2017, https://arxiv.org/abs/1708.03888: SGD with a local rate for each tensor.

    trust  the trust coefficient η: of a tensor's own length, per unit of the learning rate
    A tensor of zeros, or one without a gradient, has a local rate of 1.
    """

    def __init__(self, params, lr: float, weight_decay: float = 0.0, momentum=0.9, trust=0.001):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "trust": trust}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            decay = group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                length, slope = weight.norm(), weight.grad.norm()
                local = group["trust"] * length / (slope + decay * length)
                local = torch.where((length > 0) & (slope > 0), local, 1.0)
                gradient = weight.grad + decay * weight
                state["momentum"].mul_(group["momentum"]).add_(group["lr"] * local * gradient)
                weight.sub_(state["momentum"])


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, https://arxiv.org/abs/1904.00962, Algorithm 2: Adam's direction, rescaled.

    The step of a tensor is as long as lr times its weights, whose norm counts up to `LIMIT`. A
    tensor of zeros, or one without a direction, takes the direction as it is.
    """

    def __init__(self, params, lr: float, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-6):
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "t": 0}
        super().__init__(params, defaults)

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
                    state["mean"] = torch.zeros_like(weight)
                    state["square"] = torch.zeros_like(weight)
                mean = state["mean"].lerp_(weight.grad, 1 - beta1)
                square = state["square"].mul_(beta2)
                square.addcmul_(weight.grad, weight.grad, value=1 - beta2)
                deviation = (square / (1 - beta2**t)).sqrt() + group["eps"]
                direction = mean / (1 - beta1**t) / deviation + group["weight_decay"] * weight
                length, step = weight.norm(), direction.norm()
                ratio = torch.where((length > 0) & (step > 0), length.clamp(max=LIMIT) / step, 1.0)
                weight.sub_(group["lr"] * ratio * direction)

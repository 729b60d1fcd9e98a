"""Answers to the exercises of notebook 04, right and wrong."""

import numpy as np
import torch
from torch import nn

from by_hand import gelu_half2


def steps(order, each=(), scheduled="made", returns="scale"):
    """A group's step with its parts in some order, and those that are done after each loss."""

    def group_step(model, losses, optimizer, scheduler, scaler, limit):
        parts = {
            "unscale": lambda: scaler.unscale_(optimizer),
            "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), limit),
            "step": lambda: scaler.step(optimizer),
            "bare step": optimizer.step,
            "update": scaler.update,
            "clear": optimizer.zero_grad,
        }
        for loss in losses:
            scaler.scale(loss()).backward()
            for part in each:
                parts[part]()
        before = scaler.get_scale()
        for part in order:
            parts[part]()
        made = {
            "scale": scaler.get_scale() >= before,
            "same": scaler.get_scale() == before,
            "true": True,
            "none": None,
        }[returns]
        if made or scheduled == "always":
            scheduler.step()
        return made

    return group_step


def sigmoid(x):
    u = x * (np.float16(gelu_half2.A) + np.float16(gelu_half2.B) * (x * x))
    return x / (np.float16(1) + np.exp(np.float16(-2) * u))


def tanh(x):
    u = x * (np.float16(gelu_half2.A) + np.float16(gelu_half2.B) * (x * x))
    h = x * np.float16(0.5)
    return h * np.tanh(u) + h


def wide(x):
    return sigmoid(x.astype(np.float32)).astype(np.float16)


def through_torch(x):
    return (
        torch.nn.functional.gelu(torch.from_numpy(np.array(x)).float(), approximate="tanh")
        .half()
        .numpy()
    )


RIGHT = {
    "04.1": 2.0**-10,
    "04.2": 18,
    "04.3": steps(("unscale", "clip", "step", "update", "clear")),
    "04.4": sigmoid,
}
WRONG = {
    "04.1": [2.0**-9, 2.0**-8, 0.3 * 2.0**-8, 2.0**-13, 2e-5, 0.001, "2^-10"],
    "04.2": [16, 14, 10, 12, 20, 8, 17],
    "04.3": [
        steps(("clip", "unscale", "step", "update", "clear")),
        steps(("clip", "step", "update", "clear")), steps(("unscale", "step", "update", "clear")),
        steps(("unscale", "clip", "step", "update")), steps(("unscale", "clip", "step", "clear")),
        steps(("unscale", "clip", "bare step", "update", "clear")),
        steps((), each=("step", "update", "clear")),
        steps(("unscale", "clip", "step", "update", "clear"), scheduled="always"),
        steps(("unscale", "clip", "step", "update", "clear"), returns="true"),
        steps(("unscale", "clip", "step", "update", "clear"), returns="same"),
        steps(("unscale", "clip", "step", "update", "clear"), returns="none"),
        steps(("clip", "step", "update", "clear"), each=("unscale",)), 3,
    ],
    "04.4": [
        tanh, wide, through_torch, lambda x: x, lambda x: x / (1 + np.exp(-1.702 * x)),
        lambda x: 0 * x, 2.0,
    ],
}  # fmt: skip

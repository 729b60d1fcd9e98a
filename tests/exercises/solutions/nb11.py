"""Answers to the exercises of notebook 11, right and wrong."""

from functools import partial

import torch.nn.functional as F
from torch import nn

GIB = 2**30
ONE = 4 * 85.8e6 / GIB


def loop(fabric, net, optimizer, loader, wrong=""):
    model, optimizer = fabric.setup(net, optimizer)
    model = net if wrong == "model" else model
    losses = []
    for x, y in loader if wrong == "loader" else fabric.setup_dataloaders(loader):
        loss = F.mse_loss(model(x), y)
        loss.backward() if wrong == "backward" else fabric.backward(loss)
        if wrong == "clip":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        elif wrong != "no clip":
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses) if wrong == "result" else losses


def resumed(fabric, net, optimizer, loader, path, names=("model", "optimizer", "step"), late=0):
    model, optimizer = fabric.setup(net, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, {name: state[name] for name in names}, strict=False, weights_only=True)
    done = fabric.load(path, weights_only=True)["step"] + late
    losses = []
    for x, y in list(fabric.setup_dataloaders(loader))[done:]:
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


RIGHT = {"11.1": 8, "11.2": loop, "11.3": resumed, "11.4": (5 * ONE, 4 * ONE, ONE / 2)}
WRONG = {
    "11.1": [9, 5, 4, 7, 10, 0, 12, 8.0, "8"],
    "11.3": [
        partial(resumed, names=("model", "step")), partial(resumed, names=("optimizer", "step")),
        partial(resumed, late=1), partial(resumed, late=-9), 4,
    ],
    "11.4": [
        (4 * ONE, 4 * ONE, ONE / 2), (5 * ONE, 4 * ONE, 5 * ONE / 8),
        (5 * ONE / 8, 4 * ONE / 8, ONE / 2), (5 * ONE, 5 * ONE, ONE / 2), (5 * ONE, 4 * ONE), 1.6,
        (4 * ONE, 3 * ONE, ONE / 2),
    ],
    "11.2": [
        *(
            partial(loop, wrong=part)
            for part in ("model", "loader", "backward", "clip", "no clip", "result")
        ),
        3,
    ],
}  # fmt: skip

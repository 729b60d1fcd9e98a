"""Answers to the exercises of notebook 11, right and wrong."""

import torch.nn.functional as F
from torch import nn

GIB = 2**30
ONE = 4 * 85.8e6 / GIB


def convert(fabric, net, optimizer, loader):
    return loop(fabric, net, optimizer, loader)


def loop(
    fabric,
    net,
    optimizer,
    loader,
    wrapped=True,
    own_backward=False,
    own_clip=False,
    clip=True,
    setup_loader=True,
    bare=False,
):
    model, optimizer = fabric.setup(net, optimizer)
    model = model if wrapped else net
    losses = []
    for x, y in fabric.setup_dataloaders(loader) if setup_loader else loader:
        loss = F.mse_loss(model(x), y)
        loss.backward() if own_backward else fabric.backward(loss)
        if clip and own_clip:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        elif clip:
            fabric.clip_gradients(model if wrapped else net, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses if not bare else sum(losses)


def unwrapped(fabric, net, optimizer, loader):
    return loop(fabric, net, optimizer, loader, wrapped=False)


def old_backward(fabric, net, optimizer, loader):
    return loop(fabric, net, optimizer, loader, own_backward=True)


def old_clip(fabric, net, optimizer, loader):
    return loop(fabric, net, optimizer, loader, own_clip=True)


def no_clip(fabric, net, optimizer, loader):
    return loop(fabric, net, optimizer, loader, clip=False)


def old_loader(fabric, net, optimizer, loader):
    return loop(fabric, net, optimizer, loader, setup_loader=False)


def one_number(fabric, net, optimizer, loader):
    return loop(fabric, net, optimizer, loader, bare=True)


def go_on(fabric, net, optimizer, loader, path):
    return resumed(fabric, net, optimizer, loader, path)


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


def forgets_the_optimizer(fabric, net, optimizer, loader, path):
    return resumed(fabric, net, optimizer, loader, path, names=("model", "step"))


def forgets_the_model(fabric, net, optimizer, loader, path):
    return resumed(fabric, net, optimizer, loader, path, names=("optimizer", "step"))


def one_batch_late(fabric, net, optimizer, loader, path):
    return resumed(fabric, net, optimizer, loader, path, late=1)


def from_the_start(fabric, net, optimizer, loader, path):
    return resumed(fabric, net, optimizer, loader, path, late=-9)


RIGHT = {
    "11.1": 8,
    "11.3": go_on,
    "11.4": (5 * ONE, 4 * ONE, ONE / 2),
    "11.2": convert,
}
WRONG = {
    "11.1": [9, 5, 4, 7, 10, 0, 12, 8.0, "8"],
    "11.3": [
        forgets_the_optimizer, forgets_the_model, one_batch_late, from_the_start, 4,
    ],
    "11.4": [
        (4 * ONE, 4 * ONE, ONE / 2), (5 * ONE, 4 * ONE, 5 * ONE / 8),
        (5 * ONE / 8, 4 * ONE / 8, ONE / 2), (5 * ONE, 5 * ONE, ONE / 2), (5 * ONE, 4 * ONE), 1.6,
        (4 * ONE, 3 * ONE, ONE / 2),
    ],
    "11.2": [unwrapped, old_backward, old_clip, no_clip, old_loader, one_number, 3],
}  # fmt: skip

"""Exercises of notebook 11: Lightning Fabric."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from exercises.check import exercise
from exercises.comparisons import close, same
from exercises.handout import observe
from tight_fit.checks import plain
from tight_fit.units import GIB

LEFT = 8  # of exercise 1: the forward pass calls the model that was not set up
PARAMETERS, RANKS = 85.8e6, 8  # of exercise 4


@exercise(
    "11.1",
    hints=[
        "Fabric works in its wrapper. Which line does not go through it?",
        (
            "Two names stand for one model after line 5: one is the wrapper, "
            "and the loop calls the other."
        ),
    ],
    why=(
        "Precision lives in the wrapper's forward pass, and so do the hooks with "
        "which DDP averages gradients."
    ),
)
def _(answer):
    answer = plain(answer)
    assert isinstance(answer, int) and not isinstance(answer, bool), (
        "your answer should be the number of a line"
    )
    assert 1 <= answer <= 11, "the listing has lines 1 to 11"
    assert answer not in (1, 2, 5, 6, 9), (
        f"line {answer} is one of those that were changed, and it is right"
    )
    assert answer == LEFT, f"line {answer} is right as it was in the plain loop"


@exercise(
    "11.3",
    hints=[
        (
            "Set up first; then fabric.load(path, state, weights_only=True) puts the contents "
            "into the objects of state, a dictionary with the three names."
        ),
        (
            "After loading, state['step'] is the number of batches to skip: "
            "for x, y in list(loader)[state['step']:]."
        ),
    ],
    why="Without the optimizer's state a resumed training goes on, and to other weights",
)
def _(answer):
    assert callable(answer), "your answer should be a function"
    for name, done in (("32-true", 2), ("bf16-mixed", 3)):
        fabric = _fabric(name)
        model, optimizer, batches = _set_up(fabric)
        truth = _losses(fabric, model, optimizer, batches)[done:]
        case = f"in {name} after {done} batches"
        losses, weight = observe(_resumed, answer, name, done)
        assert isinstance(losses, list) and len(losses) == len(truth), (
            f"your function should give back a list of {len(truth)} losses {case}"
        )
        given = [float(loss) for loss in losses]
        same(given, truth, rel=1e-4, what=f"the list of losses {case}")
        wanted = model.module.weight.detach()
        same(weight, wanted, rel=1e-4, atol=1e-6, what=f"the weight at the end {case}")


def _resumed(answer, precision: str, done: int) -> tuple:
    """What the answer gives after `done` batches and a checkpoint, and the weight at the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        fabric = _fabric(precision)
        model, optimizer, batches = _set_up(fabric)
        _losses(fabric, model, optimizer, batches[:done])
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": done})
        net, optimizer, loader = _task(momentum=0.9)
        nn.init.ones_(net.weight)
        losses = answer(_fabric(precision), net, optimizer, loader, path)
    return losses, net.weight.detach()


def _set_up(fabric) -> tuple:
    """Model, optimizer and the batches of an epoch, set up by `fabric`."""
    net, optimizer, loader = _task(momentum=0.9)
    return *fabric.setup(net, optimizer), list(fabric.setup_dataloaders(loader))


def _losses(fabric, model, optimizer, batches: list) -> list[float]:
    losses = []
    for x, y in batches:
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@exercise(
    "11.4",
    hints=[
        (
            "Count fp32 copies of the parameters: weights, gradients, two states of AdamW, "
            "and with DDP the buckets."
        ),
        (
            "Four copies of four bytes, plus one for the buckets; "
            "views make gradients and buckets one; sharding divides the four by 8."
        ),
    ],
    why="DDP saves no memory at all: each rank holds what one device held, and the buckets.",
)
def _(answer):
    assert isinstance(answer, (tuple, list)) and len(answer) == 3, (
        "your answer should be three numbers: (DDP, DDP with bucket views, sharded)"
    )
    one_copy = 4 * PARAMETERS / GIB
    for name, given, copies in zip(
        ("DDP", "DDP with bucket views", "sharded"), answer, (5, 4, 4 / RANKS)
    ):
        close(given, copies * one_copy, rel=0.02, unit="GiB", what=f"your figure for {name}")


@exercise(
    "11.2",
    hints=[
        (
            "Two lines to set up, one for backward, and the clipping: "
            "what does the norm measure while the loss is scaled?"
        ),
        (
            "fabric.clip_gradients(model, optimizer, max_norm=1.0) divides by the scale first; "
            "and call the wrapped model."
        ),
    ],
    why="A loop that is right in every precision asks Fabric for all that touches gradients.",
)
def _(answer):
    for name in ("32-true", "bf16-mixed", "16-mixed"):
        truth, true_losses = _truth(_fabric(name))
        weight, losses, loader_is_set_up = observe(_trained, answer, name)
        assert isinstance(losses, list) and len(losses) == len(true_losses), (
            "your function should give back one loss per batch, in a list"
        )
        assert loader_is_set_up, (
            "your function leaves the loader as it was: on a GPU its batches would stay on the CPU"
        )
        same(
            [float(loss) for loss in losses],
            true_losses,
            rel=1e-4,
            what=f"the list of losses in {name}",
        )
        same(
            weight,
            truth,
            rel=1e-4,
            atol=1e-6,
            what=f"the weight after training in {name}",
        )


def _trained(answer, precision: str) -> tuple:
    """The weight after training, the losses, and whether the loader was set up."""
    fabric = _fabric(precision)
    net, optimizer, loader = _task()
    losses = answer(fabric, net, optimizer, loader)
    return net.weight.detach(), losses, fabric.loader_is_set_up


def _fabric(precision: str):
    """A Fabric of that precision on the CPU, which tells whether a loader was set up."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision import MixedPrecision

    class Spy(Fabric):
        """Fabric that remembers whether the loader was set up."""

        loader_is_set_up = False

        def setup_dataloaders(self, *loaders, **settings):
            self.loader_is_set_up = True
            return super().setup_dataloaders(*loaders, **settings)

    if precision == "32-true":
        return Spy(accelerator="cpu", devices=1)
    # With this scale nothing overflows.
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if precision == "16-mixed" else None
    plugin = MixedPrecision(precision, "cpu", scaler)
    return Spy(accelerator="cpu", devices=1, plugins=[plugin])


def _task(
    momentum: float = 0.0,
) -> tuple[nn.Linear, torch.optim.Optimizer, torch.utils.data.DataLoader]:
    torch.manual_seed(4)
    net = nn.Linear(6, 3)
    data = torch.utils.data.TensorDataset(3 * torch.randn(20, 6), torch.randn(20, 3))
    return (
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum),
        torch.utils.data.DataLoader(data, batch_size=4),
    )


def _truth(fabric) -> tuple[torch.Tensor, list[float]]:
    net, optimizer, loader = _task()
    model, optimizer = fabric.setup(net, optimizer)
    losses = []
    for x, y in fabric.setup_dataloaders(loader):
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return copy.deepcopy(net.weight.detach()), losses

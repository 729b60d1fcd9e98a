"""Exercises of notebook 23: moving and forgetting."""

from __future__ import annotations

import random

import torch
from torch import nn

from exercises.check import exercise
from exercises.comparisons import close
from exercises.handout import observe
from tight_fit.checks import plain
from tight_fit.units import GIB, MIB

PARAMETERS = 8.19e9  # of exercise 1
MESSAGE = (
    "CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 23.69 GiB of "
    "which {free} is free. Including non-PyTorch memory, this process has 23.10 GiB memory in use. "
    "Of the allocated memory {used} is allocated by PyTorch, and {idle} is reserved by PyTorch but "
    "unallocated."
)


@exercise(
    "23.1",
    hints=[
        "Which of weights, gradients and optimizer states are still on the GPU, all of them?",
        "The states are on the host, and a gradient lives only until its parameter is updated.",
    ],
    why="What is left are the weights: they are the floor of every full fine-tune.",
)
def _(answer):
    close(answer, 2 * PARAMETERS / GIB, rel=0.01, unit="GiB")


@exercise(
    "23.2",
    hints=[
        "Two sizes belong together: what was asked for, and what PyTorch holds idle.",
        "Read both sizes with their units: 900.00 MiB is less than 1.20 GiB.",
    ],
    why="Idle memory of the right size in pieces is fragmentation; more saving does not mend that.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of the message"
    rng = random.Random(23)
    for _ in range(30):
        tried, idle, free, used = (rng.uniform(20, 4000) * MIB for _ in range(4))
        sizes = {"tried": tried, "free": free / 100, "used": used, "idle": idle}
        message = MESSAGE.format(**{name: _written(size) for name, size in sizes.items()})
        given = plain(answer(message))
        assert isinstance(given, bool), "your function should give back True or False"
        assert given == (idle >= tried), (
            f"with {_written(tried)} asked for and {_written(idle)} idle, "
            f"your function says {given}"
        )


def _written(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.2f} MiB"


@exercise(
    "23.3",
    hints=[
        "autograd saves weights as well: a linear layer needs its weight in the backward pass.",
        (
            "Compare storages: tensor.untyped_storage().data_ptr() of a saved tensor that is a "
            "parameter, or a view of one, is that of the parameter."
        ),
    ],
    why="Copying weights to the host each step costs time and saves no memory: they stay anyway.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of the model"
    kept, copied, same, right = observe(_hooked, answer)
    assert right, "with your hooks the gradients differ from those without"
    assert copied, "your pack leaves activations where they are: their memory is not freed"
    assert kept, "your pack copies a parameter, or a view of one, such as weight.t()"
    assert same, "unpack(pack(tensor)) should have the values of the tensor"


def _hooked(answer, *_):
    """(parameters and their views kept, activations copied, values the same, gradients right)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(5, 6)
    pack, unpack = answer(model)

    def place(tensor):
        return tensor.untyped_storage().data_ptr()

    views = [*model.parameters(), model[0].weight.t(), model[2].weight[1:]]
    kept = all(place(unpack(pack(view))) == place(view) for view in views)
    value = torch.randn(4, 3)
    back = unpack(pack(value))
    model(x).square().sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = model(x).square().sum()
    loss.backward()
    moved = [parameter.grad for parameter in model.parameters()]
    right = all(torch.equal(a, b) for a, b in zip(plain, moved))
    return kept, place(back) != place(value), torch.equal(back, value), right

"""Exercises of notebook 22: torch.compile."""

from __future__ import annotations

import torch
from torch import nn

from exercises.check import exercise
from exercises.comparisons import close, same, whole_number
from exercises.handout import observe
from tight_fit.checks import plain

LENGTHS = (64, 48, 64, 32, 100, 48)  # tokens of exercise 1, step by step
WARM_UP, EAGER, COMPILED = 48.0, 0.21, 0.17  # seconds of exercise 2


@exercise(
    "22.1",
    hints=[
        "The first length is compiled as a constant. What does the second length tell PyTorch?",
        "From the second length on, the length is a variable of the graph, and one graph serves "
        "every length that follows.",
    ],
    why="Default settings recompile once when sizes change, and not for every size.",
)
def _(answer):
    answer = whole_number(answer, "graphs")
    graphs: list[object] = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x * x).sin() + 1, backend=count)
    for length in LENGTHS:
        compiled(torch.ones(4, length))
    torch.compiler.reset()
    close(answer, len(graphs), rel=1e-9, unit="graphs")


@exercise(
    "22.2",
    hints=[
        "Each compiled step saves 0.21 - 0.17 seconds.",
        "Divide the seconds of the warm-up by what a step saves.",
    ],
    why="A short run ends before its warm-up has paid for itself.",
)
def _(answer):
    close(answer, WARM_UP / (EAGER - COMPILED), rel=0.002, unit="steps")


def _kept(function, x) -> int:
    """The bytes of distinct storages that autograd saves while `function(x)` runs."""
    storages: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    return sum(storages.values())


def _twice(x):
    """The same tensor is saved by two operations."""
    y = x.cos()
    return y.sin() + y.cos()


def _views(x):
    """Two views of one storage are saved."""
    y = x + 1
    return y[:2].sin().sum() + y[1:].sin().sum()


def _input():
    return torch.randn(4, 6, requires_grad=True)


def _answered(answer, case):
    """What the answer says of one case, in the process that holds the answer."""
    return answer(CASES[case], _input())


CASES = {
    "a cosine": lambda x: x.cos(),
    "a chain": lambda x: x.cos().sin().exp(),
    "one tensor that two operations save": _twice,
    "two views of one tensor": _views,
    "a sum, which saves nothing": lambda x: x.sum(),
    "half precision": lambda x: x.half().cos(),
    "a layer": nn.Sequential(nn.Linear(6, 6), nn.GELU()),
}


@exercise(
    "22.3",
    hints=[
        "torch.autograd.graph.saved_tensors_hooks(pack, unpack) calls pack(tensor) for each tensor "
        "that is saved.",
        "Count each storage once: tensor.untyped_storage() has data_ptr() and nbytes(). Views "
        "share a storage. Keep the tensors alive while you count.",
    ],
    why="This is how the lesson measures what a compiled model really keeps.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of function and x"
    for case, function in CASES.items():
        found = plain(observe(_answered, answer, case))
        assert isinstance(found, int), f"for {case} the answer should be a whole number of bytes"
        same(found, _kept(function, _input()), what=f"the bytes of {case}")

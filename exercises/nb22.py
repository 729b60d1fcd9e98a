"""Exercises of notebook 22: torch.compile."""

from __future__ import annotations

import torch

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


def _made(function, inputs) -> int:
    """How many graphs torch.compile makes of `function` for these inputs, without dynamic sizes."""
    graphs: list[object] = []

    def count(graph, examples):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(function, backend=count, dynamic=False)
    for x in inputs:
        compiled(x)
    torch.compiler.reset()
    return len(graphs)


def _asks(x):
    y = x * x
    if y.sum() > 3:  # Python needs the number: a break
        y = y - 1
    return y + 1


def _asks_twice(x):
    y = _asks(x)
    if y.max() > 2:
        y = y.sin()
    return y.cos()


def _answered(answer, case):
    """What the answer says of one case, in the process that holds the answer."""
    torch.compiler.reset()
    function, lengths = CASES[case]
    return answer(function, [torch.ones(4, length) for length in lengths])


CASES = {
    "a function without breaks": (lambda x: (x * x).sin() + 1, (8,)),
    "the same at three lengths": (lambda x: (x * x).sin() + 1, (8, 5, 8, 3)),
    "a function with a break": (_asks, (8,)),
    "a function with two breaks": (_asks_twice, (8,)),
    "one with two breaks at two lengths": (_asks_twice, (8, 6, 8)),
}


@exercise(
    "22.3",
    hints=[
        "A backend is a function of a graph and example inputs: count there, return graph.forward.",
        "torch.compile(function, backend=count, dynamic=False); call it on every input in turn.",
    ],
    why="Breaks and recompiles give no warning; a count of graphs before and after a change does.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of function and inputs"
    for case, (function, lengths) in CASES.items():
        found = plain(observe(_answered, answer, case))
        assert isinstance(found, int), f"for {case} the answer should be a whole number of graphs"
        wanted = _made(function, [torch.ones(4, length) for length in lengths])
        same(found, wanted, what=f"the number of graphs of {case}")

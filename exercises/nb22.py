"""Exercises of notebook 22: torch.compile."""

from __future__ import annotations

import torch

from exercises.check import exercise
from exercises.comparisons import close, same, whole_number
from exercises.handout import observe
from tight_fit.checks import plain

SHAPES = ((8, 64), (8, 48), (8, 32), (5, 100), (8, 48), (3, 64))  # of exercise 1: rows, tokens
WARM_UP, EAGER, COMPILED = 48.0, 0.21, 0.17  # seconds of exercise 2
SAVED = 0.1  # of the run's time


@exercise(
    "22.1",
    hints=[
        "Rows and tokens are two sizes. Which of them have changed when the second batch comes?",
        "A size becomes a variable when it first changes: the tokens at the second batch, the rows "
        "at the fourth. What has become a variable fits every later batch.",
    ],
    why="Default settings recompile once for each size that begins to change, not for every value",
)
def _(answer):
    answer = whole_number(answer, "graphs")
    graphs: list[object] = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x * x).sin() + 1, backend=count)
    for shape in SHAPES:
        compiled(torch.ones(shape))
    torch.compiler.reset()
    close(answer, len(graphs), rel=1e-9, unit="graphs")


@exercise(
    "22.2",
    hints=[
        "With n steps the runs take 0.21 n and 48 + 0.17 n seconds.",
        "48 + 0.17 n = 0.9 x 0.21 n: solve it for n.",
    ],
    why="The warm-up has paid for itself after 1,200 steps; to save a tenth takes twice as many",
)
def _(answer):
    steps = WARM_UP / ((1 - SAVED) * EAGER - COMPILED)
    close(answer, steps, rel=0.002, unit="steps")


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

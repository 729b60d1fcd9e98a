"""Answers to the exercises of notebook 22, right and wrong."""

import torch


def compiled(function, inputs, dynamic=False):
    """The graphs that calls of a compiled function made."""
    graphs = []

    def count(graph, examples):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(function, backend=count, dynamic=dynamic)
    for x in inputs:
        compiled(x)
    return graphs


def graphs_of(function, inputs):
    return len(compiled(function, inputs))


RIGHT = {"22.1": 3, "22.2": 2527, "22.3": graphs_of}
WRONG = {
    "22.1": [6, 5, 2, 1, 2.5, "3"],
    "22.2": [48, 1200, 1333, 12_000, "2526"],
    "22.3": [
        lambda function, inputs: len(compiled(function, inputs, dynamic=None)),
        lambda function, inputs: len({x.shape for x in inputs}),
        lambda function, inputs: sum(
            len(graph.graph.nodes) for graph in compiled(function, inputs)
        ),
        3,
    ],
}

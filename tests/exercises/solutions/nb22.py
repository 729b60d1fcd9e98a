"""Answers to the exercises of notebook 22, right and wrong."""

import torch


def graphs_of(function, inputs, dynamic=False):
    graphs = []

    def count(graph, examples):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(function, backend=count, dynamic=dynamic)
    for x in inputs:
        compiled(x)
    return len(graphs)


def by_default(function, inputs):
    return graphs_of(function, inputs, dynamic=None)


def one_per_length(function, inputs):
    return len({x.shape for x in inputs})


def operations(function, inputs):
    nodes = []

    def count(graph, examples):
        nodes.extend(graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(function, backend=count, dynamic=False)
    for x in inputs:
        compiled(x)
    return len(nodes)


RIGHT = {"22.1": 3, "22.2": 2527, "22.3": graphs_of}
WRONG = {
    "22.1": [6, 5, 2, 1, 2.5, "3"],
    "22.2": [48, 1200, 1333, 12_000, "2526"],
    "22.3": [by_default, one_per_length, operations, 3],
}

"""What dispatch modes change about a step, and the tracker corrects: gradients added in place.

The reference is PyTorch's profiler, which no mode disturbs: it names the additions that the
autograd engine made, `add_` in place and `add` into a new tensor.
"""

import pytest
import torch
from torch.profiler import profile

from tight_fit.torch_private import (
    ADD,
    TorchDispatchMode,
    adds_in_place,
    count_holders,
)
from tight_fit.trace.cublas import copied_for_cublas
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.storage_trace import BORN, DIES
from tight_fit.trace.tracker import Tracker

N = 64


class PlusItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient


def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + (x @ w)
    return (x * x).sum()


def parallel(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + (x @ w) + (x @ w.t()).relu()
    return (x * x).sum()


def tied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w) @ w).sum()


def gradient_of_a_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x * 1.5
    return (hidden + hidden @ w).sum()


def views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x * 1.5
    return hidden.view(-1, 8).tanh().sum() + hidden.t().relu().sum() + hidden.sum()


def in_python(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return PlusItself.apply(x * 1).pow(2).sum()


GRAPHS = [residual, parallel, tied, gradient_of_a_sum, views, in_python]


def made(graph) -> torch.Tensor:
    """The loss of a graph on two new leaves."""
    return graph(*(torch.randn(N, N, requires_grad=True) for _ in range(2)))


class Additions(TorchDispatchMode):
    """Names the additions of a backward pass as they would be without a mode."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is ADD:
            in_place = adds_in_place(function, args, kwargs or {})
            self.names.append("aten::add_" if in_place else "aten::add")
        return function(*args, **(kwargs or {}))


def seen(graph) -> list[str]:
    loss = made(graph)
    with Additions() as additions:
        loss.backward()
    return additions.names


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_additions_are_those_that_autograd_makes_without_a_mode(graph):
    count_holders()
    loss = made(graph)
    with profile() as profiled:
        loss.backward()
    true = [e.name for e in profiled.events() if e.name in ("aten::add", "aten::add_")]
    assert true and seen(graph) == true
    with FakeTensorMode():
        assert seen(graph) == true


def test_the_tracker_counts_no_new_tensor_for_an_addition_in_place():
    loss = made(residual)
    with Tracker() as tracker:
        tracker.phase("backward")
        loss.backward()
    trace = tracker.storage_trace
    by = [trace.made_by[event[1]] for event in trace.events if event[0] == BORN]
    assert "add" not in by and by.count("mm") == 6
    born, died = ([e[1] for e in trace.events if e[0] == kind] for kind in (BORN, DIES))
    assert len(set(born)) == len(born) and set(died) <= set(born)


def test_a_gpu_copies_what_cublas_cannot_read():
    whole = torch.zeros(8, 6)
    batches = torch.zeros(3, 8, 6)
    for read in (whole, whole.t(), whole[:, 2:], whole[::2], batches, batches.transpose(1, 2)):
        assert not copied_for_cublas([read, whole]), read.stride()
    one = torch.zeros(())
    for copied in (one.expand(8, 6), whole[:, ::2], batches[0:1, :1, :1].expand(3, 8, 6)):
        assert copied_for_cublas([copied, whole]) == [copied], copied.stride()


def test_the_copy_lives_as_long_as_the_product():
    def bytes_of_copies(on_gpu: bool) -> list[int]:
        with FakeTensorMode():
            x = torch.zeros(32, 16, requires_grad=True)
            w = torch.zeros(16, 8, requires_grad=True)
            with Tracker(on_gpu=on_gpu) as tracker:
                (x @ w).sum().backward()
        trace = tracker.storage_trace
        copies = [index for index, name in enumerate(trace.made_by) if name == "copy for cuBLAS"]
        for copy in copies:
            kinds = [event[0] for event in trace.events if event[1] == copy]
            assert kinds == [BORN, DIES]
        return [trace.bytes[copy] for copy in copies]

    assert bytes_of_copies(False) == []
    assert bytes_of_copies(True) == [4 * 32 * 8] * 2  # the gradient, in both of its products

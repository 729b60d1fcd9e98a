"""Lessons 20 and 24: the loss in chunks that they give to paste, beside PyTorch's and in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lessons.cells import the_cell
from tight_fit.plans.own_step import plan_custom_step


@pytest.fixture(scope="module", params=["20", "24"])
def lesson(request):
    names = {"torch": torch, "F": F}
    exec(the_cell(request.param, "def in_chunks"), names)
    return names


def at_once(head, states, wanted):
    return F.cross_entropy(head(states).float(), wanted, reduction="sum")


def peak(loss, width, trains=True):
    """Planned bytes of a bf16 head of Qwen3's vocabulary and its loss alone, of 2,048 tokens."""

    def setup():
        head = nn.Linear(width, 151_936, bias=False, dtype=torch.bfloat16, device="cuda")
        head.requires_grad_(trains)
        states = torch.zeros(2048, width, dtype=torch.bfloat16, device="cuda")
        wanted = torch.zeros(2048, dtype=torch.int64, device="cuda")

        def step():
            loss(head, states.detach().requires_grad_(), wanted).backward()
            head.weight.grad = None

        return [head, states, wanted], step

    return plan_custom_step(setup).peak


@pytest.mark.parametrize("chunk", [3, 256])
def test_loss_and_gradients_are_those_of_cross_entropy(lesson, chunk):
    torch.manual_seed(0)
    head = nn.Linear(8, 50, bias=False, dtype=torch.float64)
    states = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    wanted = torch.randint(50, (12,))
    wanted[3] = -100
    whole = F.cross_entropy(head(states), wanted, reduction="sum")
    parts = lesson["in_chunks"](head, states, wanted, chunk)
    torch.testing.assert_close(parts, whole, check_dtype=False)
    for part, full in zip(*(torch.autograd.grad(x, (states, head.weight)) for x in (parts, whole))):
        torch.testing.assert_close(part, full, rtol=1e-5, atol=1e-6)


def test_what_is_pasted_takes_no_more_than_all_logits(lesson):
    """Planned for a GPU: 2,048 tokens of heads as wide as Qwen3-0.6B's and Qwen3-8B's."""
    ways = (at_once, lesson["in_chunks"])
    small, large = ([peak(way, width) for way in ways] for width in (1024, 4096))
    assert small[1] < small[0] / 2 and large[1] < 1.01 * large[0]
    assert peak(lesson["in_chunks"], 4096, False) < large[0] / 2  # a frozen head


def test_a_frozen_head_gets_no_gradient(lesson):
    head = nn.Linear(4, 9, bias=False).requires_grad_(False)
    states = torch.randn(5, 4, requires_grad=True)
    lesson["in_chunks"](head, states, torch.zeros(5, dtype=torch.int64), 2).backward()
    assert states.grad is not None and head.weight.grad is None

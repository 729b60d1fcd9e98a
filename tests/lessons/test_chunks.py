"""Lesson 20: the loss in chunks that it gives to paste, beside PyTorch's and in memory."""

import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import models
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tests.lessons.cells import the_cell
from tight_fit.plans.own_step import plan_custom_step


@pytest.fixture(scope="module")
def lesson():
    names = {"torch": torch, "F": F, "nn": nn, "vocabulary": 151_936, "print": lambda *said: None}
    for words in ("def loss_and_gradient", "class ChunkedLoss", "def in_chunks", "def peak("):
        exec(the_cell("20", words), names)
    return names


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
    ways = (lesson["at_once"], lesson["in_chunks"])
    small, large = ([lesson["peak"](way, width) for way in ways] for width in (1024, 4096))
    assert small[1] < small[0] / 2 and large[1] < 1.01 * large[0]
    assert lesson["peak"](lesson["in_chunks"], 4096, False) < large[0] / 2  # a frozen head


def test_a_frozen_head_gets_no_gradient(lesson):
    head = nn.Linear(4, 9, bias=False).requires_grad_(False)
    states = torch.randn(5, 4, requires_grad=True)
    lesson["in_chunks"](head, states, torch.zeros(5, dtype=torch.int64), 2).backward()
    assert states.grad is not None and head.weight.grad is None


def test_the_script_at_full_size_takes_what_the_last_row_says():
    """Qwen3-0.6B with 4 x 512 tokens, as the page says how: its loop's step, planned on a GPU."""
    recipe = Recipe("decoder", profile="full", batch_size=4, length=512, precision="bf16")
    recipe = replace(recipe, attention="sdpa", loss="chunked", checkpointing=True)
    planned = plan(replace(recipe, base="bf16", optimizer="adamw_stochastic")).peak
    full = models.config(recipe)
    made = the_cell("20", "config = Qwen3Config(vocab_size=500")
    tiny = "Qwen3Config(vocab_size=500, num_key_value_heads=2, head_dim=16, **sizes)"
    made = made.replace(tiny, "full")
    made = made.replace('"cuda" if torch.cuda.is_available() else "cpu"', '"cuda"')
    made = made.replace("torch.randint(500, (2, 32)", "torch.randint(500, (4, 512)")
    made += "\nmodel.train()\nmodel.gradient_checkpointing_enable()\n"
    loop = the_cell("20", "for step in range(30):").replace("wanted, 16)", "wanted)")
    step = textwrap.dedent(loop.partition("\n")[2].partition("    if step % 10")[0])

    random = the_cell("20", "def rounded(").partition("torch.manual_seed")[0]

    def setup():
        names = {"torch": torch, "F": F, "full": full}
        for source in (
            the_cell("20", "def in_chunks"),
            random,
            made,
            the_cell("20", "momentum = ["),
        ):
            exec(source, names)

        def a_step():
            exec(step, names)
            del names["states"], names["loss"]

        return [names["model"], names["momentum"], names["ids"], names["wanted"]], a_step

    assert plan_custom_step(setup).peak == pytest.approx(planned, rel=0.01)
    plain = step.replace("p.view(-1).split(2**22), m.view(-1).split(2**22)", "[p], [m]")
    assert step != plain
    step = plain
    assert plan_custom_step(setup).peak > 1.3 * planned

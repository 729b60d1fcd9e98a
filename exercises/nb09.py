"""Exercises of notebook 09: dynamic padding."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn.functional as F

from by_hand.collate import IGNORE, pad
from by_hand.padding import padded_share
from exercises.check import exercise
from exercises.comparisons import agree, close, same
from exercises.handout import observe

LENGTHS = [12, 40, 33, 250, 61, 18, 90, 25]  # of exercise 1


@exercise(
    "09.1",
    hints=[
        "The first four texts are padded to 250 rounded up, the other four to 90 rounded up.",
        "Padding is what is left of 4 x 256 + 4 x 96 tokens when the texts' own are taken away.",
    ],
    why="One long text decides for its whole micro-batch.",
)
def _(answer):
    close(answer, padded_share([[0, 1, 2, 3], [4, 5, 6, 7]], LENGTHS))


@exercise(
    "09.2",
    hints=[
        (
            "Make three full tensors first: of pad_id, of 0 and of -100; "
            "then write each example into its row."
        ),
        (
            "The mask follows from the lengths, never from a comparison with pad_id: "
            "a real token may be that number."
        ),
    ],
    why=(
        "DataCollatorForTokenClassification is this function; "
        "padding has to be left out of attention and loss alike."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of rows and pad_id"
    rng = random.Random(9)
    for sizes in (
        [3],
        [8, 8],
        [1, 9],
        *([rng.randint(1, 40) for _ in range(rng.randint(1, 6))] for _ in range(8)),
    ):
        pad_id = rng.choice((0, 3))
        examples = [
            {
                "input_ids": [rng.randint(0, 5) for _ in range(count)],
                "labels": [rng.randint(0, 2) for _ in range(count)],
            }
            for count in sizes
        ]
        given, case = copy.deepcopy(examples), f"texts of {', '.join(map(str, sizes))} tokens"
        batch = answer(given, pad_id)
        assert given == examples, (
            "your function changes the examples that it is given: "
            "the next epoch would meet them padded"
        )
        keys = {"input_ids", "attention_mask", "labels"}
        assert isinstance(batch, dict) and batch.keys() == keys, (
            "your function should return a dict with input_ids, attention_mask and labels, "
            "and nothing else"
        )
        for name, truth in pad(examples, pad_id).items():
            same(batch[name], truth, rel=0, atol=0, what=f"{name} for {case}")
            dtype = batch[name].dtype
            assert dtype == torch.int64, f"{name} should be int64, and is {dtype}"


@exercise(
    "09.4",
    hints=[
        "The sum is right already; which number should it be divided by?",
        (
            "Divide by mask.sum(), and let cross_entropy ignore what the mask masks: "
            "set those labels to -100 in a copy."
        ),
    ],
    why="Divided by all positions, the loss and every gradient shrink as the padding grows.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of logits, labels and mask"
    generator = torch.Generator().manual_seed(3)
    for sizes, padded in (([5, 2, 4], 5), ([5, 2, 4], 12), ([3, 7], 8), ([1, 20, 6, 6], 24)):
        mask = torch.stack([torch.arange(padded) < count for count in sizes]).long()
        labels = torch.randint(0, 3, mask.shape, generator=generator)
        logits = torch.randn(*mask.shape, 3, generator=generator, requires_grad=True)
        real = mask.bool()
        truth = F.cross_entropy(logits[real], labels[real])
        (wanted,) = torch.autograd.grad(truth, logits)
        for label in (0, -1, IGNORE):
            marked = labels.masked_fill(~real, label)
            counts = ", ".join(map(str, sizes))
            case = f"examples of {counts} tokens padded to {padded}, padding labelled {label}"
            loss, slope, after = observe(_loss_and_gradient, answer, logits.detach(), marked, mask)
            assert isinstance(loss, torch.Tensor), (
                "your function should return a tensor, so that it has a gradient"
            )
            assert torch.equal(after, marked), (
                "your function changes the labels that it is given: work on a copy"
            )
            same(loss, truth, rel=1e-5, what=f"the loss for {case}")
            same(slope, wanted, rel=1e-4, atol=1e-7, what=f"the gradient for {case}")


@exercise(
    "09.3",
    hints=[
        (
            "A micro-batch of n examples has the full padded length with probability 1 - "
            "(1 - p)^n; it grows with n."
        ),
        "Solve (1 - p)^n >= 1 - share for n and round down, or count up until it no longer holds.",
    ],
    why="The distribution of lengths says how small a micro-batch must be, before anything is run.",
)
def _(answer):
    def truth(p, share):
        examples = 0
        while 1 - (1 - p) ** (examples + 1) <= share:
            examples += 1
        return examples

    agree(
        answer,
        truth,
        [(0.125, 0.5), (0.3, 0.1), (0.01, 0.9), (0.6, 0.5), (0.9, 0.95)],
        lambda rng: (rng.uniform(0.005, 0.7), rng.uniform(0.05, 0.95)),
        times=12,
        rel=0,
    )


def _loss_and_gradient(answer, logits, labels, mask) -> tuple:
    """What the answer gives, its gradient with respect to the logits, and the labels afterwards."""
    logits, labels = logits.clone().requires_grad_(), labels.clone()
    loss = answer(logits, labels, mask)
    if not isinstance(loss, torch.Tensor):
        return loss, None, labels
    return loss, torch.autograd.grad(loss, logits)[0], labels

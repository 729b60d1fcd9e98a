"""Exercises of notebook 26: preference and reward tuning."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from exercises.check import exercise
from exercises.comparisons import close

LAYERS, HEADS, WIDTH, ROWS, TOKENS = 32, 8, 128, 64, 1024  # of exercise 1


@exercise(
    "26.1",
    hints=[
        "A token has keys and values in each layer: count both.",
        "2 × layers × key-value heads × head width numbers per token, of two bytes each.",
    ],
    why="All completions of a step are written together, so that the cache grows with their "
    "number, whatever the size of the micro-batch.",
)
def _(answer):
    close(answer, 2 * LAYERS * HEADS * WIDTH * ROWS * TOKENS * 2, unit="bytes")


@exercise(
    "26.2",
    hints=[
        "First what each answer has gained: own minus reference. The chosen answers are the first "
        "half of both tensors.",
        "Then -logsigmoid(beta * (chosen - rejected)), and the mean over the pairs.",
    ],
    why="Only the difference of the two gains counts: the loss does not see whether the chosen "
    "answer itself has become more or less likely.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of own, reference and beta"
    generator = torch.Generator().manual_seed(26)
    for pairs, beta in ((1, 0.1), (3, 0.1), (4, 0.5)):
        own, reference = -20 * torch.rand(2, 2 * pairs, generator=generator)
        given = answer(own.clone(), reference.clone(), beta)
        assert isinstance(given, torch.Tensor) and given.numel() == 1, (
            "your function should give back one number, as a tensor"
        )
        gained = own - reference
        expected = -F.logsigmoid(beta * (gained[:pairs] - gained[pairs:])).mean()
        assert torch.allclose(given.detach().squeeze(), expected, atol=1e-5), (
            f"with {pairs} pairs and beta={beta} your loss is {float(given):.4f}, and not "
            f"{float(expected):.4f}"
        )


@exercise(
    "26.3",
    hints=[
        "view(-1, group) makes a row of each group.",
        "Where all rewards of a group are alike, the standard deviation is 0: add 1e-4 to it.",
    ],
    why="A group whose rewards are all alike teaches nothing: its advantages are 0.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of rewards and group"
    cases = (
        (torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]), 4),
        (torch.tensor([2.0, 3.0, 7.0, 1.0, 1.0, 1.0]), 3),
        (torch.tensor([0.5, 0.25]), 2),
    )
    for rewards, group in cases:
        given = answer(rewards.clone(), group)
        assert isinstance(given, torch.Tensor) and given.shape == rewards.shape, (
            f"of {len(rewards)} rewards your function should make a tensor of {len(rewards)} "
            "advantages"
        )
        rows = rewards.view(-1, group)
        expected = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-4)
        assert torch.allclose(given, expected.flatten(), atol=1e-3), (
            f"for {rewards.tolist()} in groups of {group} your advantages are "
            f"{[round(float(value), 2) for value in given]}"
        )

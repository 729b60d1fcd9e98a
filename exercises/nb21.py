"""Exercises of notebook 21: QLoRA."""

from __future__ import annotations

import torch

from exercises.check import exercise
from exercises.comparisons import close, same
from exercises.handout import observe

LEVELS = torch.tensor([-1.0, -0.5, -0.1, 0.0, 0.2, 0.6, 1.0])


@exercise(
    "21.1",
    hints=[
        "Four bits are half a byte, and each block of 64 weights has one scale of 4 bytes.",
        "7,000,000,000 / 2 bytes for the weights, and 7,000,000,000 / 64 x 4 bytes for the scales.",
    ],
    why="Without double quantization the scales are a ninth of the whole",
)
def _(answer):
    close(answer, 7e9 / 2 + 7e9 / 64 * 4, rel=1e-6, unit="bytes")


@exercise(
    "21.2",
    hints=[
        "The scale is the largest absolute value; compare block / scale with every level.",
        "(block[:, None] / scale - levels).abs().argmin(1), and 0 / 0 needs a case of its own.",
    ],
    why="This and a table of sixteen levels is all that NF4 does when a model is loaded",
)
def _(answer):
    assert callable(answer), "your answer should be a function of block and levels"
    torch.manual_seed(21)
    for block in (
        torch.tensor([0.2, -0.8, 0.3]),
        torch.randn(64),
        3 * torch.randn(8),
        torch.zeros(5),
    ):
        largest = block.abs().max()
        numbers = (block[:, None] / (largest or 1.0) - LEVELS).abs().argmin(1)
        given = observe(_quantized, answer, block.clone(), LEVELS.clone())
        case = f"of a block of {len(block)} weights" + ("" if largest else " that are all 0")
        assert given is not None, "your function should return a scale and a tensor of numbers"
        scale, found, after = given
        same(after, block, what="what your function was given, afterwards,")
        close(scale, largest.item(), rel=1e-6, what=f"the scale {case}")
        assert isinstance(found, torch.Tensor) and found.dtype == torch.int64, (
            f"the numbers {case} should be an int64 tensor"
        )
        same(found, numbers, what=f"the tensor of numbers {case}")


def _quantized(answer, block, levels):
    """(scale, numbers, the block afterwards) of an answer; None where it gives no pair."""
    given = answer(block, levels)
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    return *given, block


@exercise(
    "21.3",
    hints=[
        "levels[indices] looks every weight up; reshape it to rows of 64 and multiply by scales.",
        "(levels[indices].view(-1, 64) * scales[:, None]).view_as(...) + alpha / rank * B @ A",
    ],
    why="Rounded to levels again, most of what the adapters learned would be lost",
)
def _(answer):
    assert callable(answer), "your answer should be a function of six arguments"
    torch.manual_seed(23)
    for rows, columns, rank, alpha in ((4, 128, 2, 4.0), (8, 64, 3, 3.0), (2, 32, 1, 8.0)):
        indices = torch.randint(len(LEVELS), (rows, columns))
        scales = torch.rand(rows * columns // 64) + 0.1
        A, B = torch.randn(rank, columns), torch.randn(rows, rank)
        weight = (LEVELS[indices].reshape(-1, 64) * scales[:, None]).reshape(rows, columns)
        given = answer(indices, scales, LEVELS.clone(), A, B, alpha)
        case = f"for a weight of shape ({rows}, {columns}), rank {rank} and alpha {alpha:g}"
        assert isinstance(given, torch.Tensor) and tuple(given.shape) == (rows, columns), (
            f"your function should return a tensor of the weight's shape {case}"
        )
        same(given, weight + alpha / rank * B @ A, rel=1e-4, atol=1e-5, what=f"the weight {case}")

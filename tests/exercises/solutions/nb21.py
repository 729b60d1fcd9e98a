"""Answers to the exercises of notebook 21, right and wrong."""

import torch

from tests.exercises import mistakes


def quantize(block, levels, wrong=""):
    """`wrong` is the mistake that it makes."""
    scale = block.max() if wrong == "by the largest" else block.abs().max()
    by = scale if wrong == "no case for zero" else scale or 1
    divided = block.div_(by) if wrong == "in place" else block / by
    numbers = (divided[:, None] - levels).abs().argmin(1)
    if wrong == "the next lower":
        numbers = torch.searchsorted(levels, divided, right=True) - 1
    return scale, levels[numbers] * scale if wrong == "weights" else numbers


def merge(indices, scales, levels, A, B, alpha, wrong=""):
    """`wrong` is the mistake that it makes."""
    block = 64
    if wrong == "a scale per row":
        block, scales = indices.shape[1], scales.repeat(len(indices))[: len(indices)]
    weight = (levels[indices].reshape(-1, block) * scales[:, None]).reshape(indices.shape)
    return weight + alpha / A.shape[0] * B @ A


RIGHT = {"21.1": 7e9 / 2 + 7e9 / 64 * 4, "21.2": quantize, "21.3": merge}
WRONG = {
    "21.1": [3.5e9, 7e9 / 2 + 7e9 / 64, 7e9 * 4.127 / 8, 7e9 / 2 + 7e9 / 64 * 2, 3.7, "3.9 GB"],
    "21.2": [
        *mistakes(
            quantize, "no case for zero", "by the largest", "the next lower", "weights", "in place"
        ),
        lambda block, levels: quantize(block, levels)[1], 3,
    ],
    "21.3": [*mistakes(merge, "a scale per row"), 3],
}  # fmt: skip

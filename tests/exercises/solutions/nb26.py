"""Answers to the exercises of notebook 26, right and wrong."""

import torch
import torch.nn.functional as F

from tests.exercises import mistakes


def dpo(own, reference, beta, wrong=""):
    """`wrong` is the mistake that it makes."""
    gained = own if wrong == "without reference" else own - reference
    pairs = (gained[::2], gained[1::2]) if wrong == "one after another" else gained.chunk(2)
    return -F.logsigmoid(beta * (pairs[0] - pairs[1])).mean()


def advantages(rewards, group, wrong=""):
    """`wrong` is the mistake that it makes."""
    rows = rewards.view(group, -1).T if wrong == "across" else rewards.view(-1, group)
    mean, spread = rows.mean(1, keepdim=True), rows.std(1, keepdim=True)
    if wrong == "of all":
        mean, spread = rewards.mean(), rewards.std()
    spread = {"not scaled": 1, "divided by zero": spread}.get(wrong, spread + 1e-4)
    above = (rows - mean) / spread
    return (above.T if wrong == "across" else above).flatten()


RIGHT = {"26.1": 8 * 2**30, "26.2": dpo, "26.3": advantages}
WRONG = {
    "26.1": [4 * 2**30, 8, 2**37, 131072, "8"],
    "26.2": [
        *mistakes(dpo, "without reference", "one after another"), 0.5, lambda *given: 0.5,
        lambda own, reference, beta: dpo(own, reference, beta) * (len(own) // 2),
        lambda own, reference, beta: dpo(reference, own, beta),
    ],
    "26.3": [
        *mistakes(advantages, "of all", "not scaled", "divided by zero", "across"),
        torch.zeros(8), lambda *given: 0,
    ],
}  # fmt: skip

"""Answers to the exercises of notebook 02, right and wrong."""

import torch
import torch.nn.functional as F

from tests.exercises import mistakes


def total_loss(model, inputs, labels):
    return F.cross_entropy(
        model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def counted(group):
    return sum(int((labels != -100).sum()) for _, labels in group)


def train_group(model, optimizer, micro_batches, wrong=""):
    """`wrong` is the mistake that it makes."""
    group = micro_batches if wrong == "reads a generator twice" else list(micro_batches)
    if wrong == "steps every time":
        return sum(train_group(model, optimizer, [pair]) for pair in group)
    if wrong == "all at once":
        group = [tuple(torch.cat(parts) for parts in zip(*group))]
    tokens, mean = counted(group), 0.0

    def divisor(pair):
        return max(1, counted([pair])) * len(group) if wrong == "mean of means" else tokens

    losses = (total_loss(model, *pair) / divisor(pair) for pair in group)
    for loss in [sum(losses)] if wrong == "one backward for all" else losses:
        loss.backward()
        mean += loss.item()
    optimizer.step()
    if wrong != "never clears":
        optimizer.zero_grad()
    return None if wrong == "says nothing" else mean


def momenta(m, k):
    return [m / k / (1 - m * (k - j) / k) for j in range(1, k + 1)]


RIGHT = {"02.1": 1.75, "02.2": 4, "02.3": train_group, "02.4": momenta}
WRONG = {
    "02.1": [1.0, 0.75, 1.25, 7, 4, "1.75"],
    "02.2": [2, 8, 3, 4.5],
    "02.3": [
        *mistakes(
            train_group,
            "mean of means", "reads a generator twice", "all at once", "one backward for all",
            "steps every time", "never clears", "says nothing",
        ),
        3,
    ],
    "02.4": [
        lambda m, k: [1 - (1 - m) ** (1 / k)] * k, lambda m, k: [m / k] * k, lambda m, k: [m] * k,
        lambda m, k: momenta(m, k)[::-1], lambda m, k: m / k,
    ],
}  # fmt: skip

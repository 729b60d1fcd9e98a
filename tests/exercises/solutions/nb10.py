"""Answers to the exercises of notebook 10, right and wrong."""

import random
from functools import partial

from tests.exercises import mistakes


def cut(rows, size):
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def buckets(lengths, batch_size, window, seed, wrong=""):
    """`wrong` is the mistake that it makes."""
    generator = random.Random(seed)
    rows = list(range(len(lengths)))
    generator.shuffle(rows)
    batches = []
    for part in cut(rows, window * batch_size):
        part = part if wrong == "not sorted" else sorted(part, key=lengths.__getitem__)
        batches += cut(part, batch_size)
    if wrong != "not mixed":
        generator.shuffle(batches)
    if wrong == "drops the rest":
        batches = [batch for batch in batches if len(batch) == batch_size]
    if wrong == "lengths for rows":
        batches = [[lengths[row] for row in batch] for batch in batches]
    return batches


def sorted_all(lengths, batch_size, window, seed, mixed=False):
    batches = cut(sorted(range(len(lengths)), key=lengths.__getitem__), batch_size)
    if mixed:
        random.Random(seed).shuffle(batches)
    return batches


def budget_batches(lengths, order, budget, wrong=""):
    """`wrong` is the mistake that it makes."""
    batches, longest = [[]], 0
    for text in order:
        before, longest = longest, max(longest, lengths[text])
        takes = (len(batches[-1]) + 1) * longest
        if wrong == "without padding":
            takes = sum(lengths[one] for one in [*batches[-1], text])
        if wrong == "one too many":
            takes = len(batches[-1]) * before
        if batches[-1] and takes > budget:
            batches.append([])
            longest = longest if wrong == "never shorter again" else lengths[text]
        batches[-1].append(text)
    return batches


def packed_labels(texts, wrong=""):
    """`wrong` is the mistake that it makes."""
    row = []
    for prompt, answer in texts:
        before = prompt if wrong == "learns prompts" else [-100] * len(prompt)
        labels = [*before, *answer]
        row += labels if wrong == "keeps the first" else [-100, *labels[1:]]
    return row


RIGHT = {"10.1": budget_batches, "10.4": buckets, "10.2": packed_labels, "10.3": {"D", "E"}}
WRONG = {
    "10.1": [
        *mistakes(budget_batches, "without padding", "never shorter again", "one too many"),
        lambda lengths, order, budget: budget_batches(lengths, sorted(order), budget), 3,
    ],
    "10.4": [
        sorted_all, partial(sorted_all, mixed=True),
        *mistakes(buckets, "not sorted", "not mixed", "drops the rest", "lengths for rows"),
        lambda *given: buckets(*given[:3], random.random()), [[0, 1]],
    ],
    "10.2": [
        *mistakes(packed_labels, "keeps the first", "learns prompts"), lambda texts: [],
        lambda texts: [max(0, label) for label in packed_labels(texts)], 3,
    ],
    "10.3": [
        {"A", "D", "E"}, {"B", "D"}, {"C", "D", "E"}, {"D"}, {"E"}, {"B", "D", "E"}, "DEF", 2,
        set(), {"D", "E", "F"},
    ],
}  # fmt: skip

"""Answers to the exercises of notebook 10, right and wrong."""

import random
from functools import partial


def cut(rows, size):
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def buckets(lengths, batch_size, window, seed, by_length=True, mixed=True):
    generator = random.Random(seed)
    rows = list(range(len(lengths)))
    generator.shuffle(rows)
    batches = []
    for part in cut(rows, window * batch_size):
        batches += cut(sorted(part, key=lengths.__getitem__) if by_length else part, batch_size)
    if mixed:
        generator.shuffle(batches)
    return batches


def drops_the_rest(lengths, batch_size, window, seed):
    batches = buckets(lengths, batch_size, window, seed)
    return [batch for batch in batches if len(batch) == batch_size]


def sorted_all(lengths, batch_size, window, seed):
    return cut(sorted(range(len(lengths)), key=lengths.__getitem__), batch_size)


def sorted_then_shuffled(lengths, batch_size, window, seed):
    batches = sorted_all(lengths, batch_size, window, seed)
    random.Random(seed).shuffle(batches)
    return batches


def lengths_not_rows(lengths, batch_size, window, seed):
    return [[lengths[row] for row in batch] for batch in buckets(lengths, batch_size, window, seed)]


def budget_batches(lengths, order, budget, fresh=True):
    batches, longest = [], 0
    for text in order:
        longest = max(longest, lengths[text])
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[text] if fresh else longest
        batches[-1].append(text)
    return batches


def without_padding(lengths, order, budget):
    batches, tokens = [], 0
    for text in order:
        tokens += lengths[text]
        if not batches or tokens > budget:
            batches.append([])
            tokens = lengths[text]
        batches[-1].append(text)
    return batches


def one_too_many(lengths, order, budget):
    batches, longest = [], 0
    for text in order:
        if not batches or len(batches[-1]) * longest > budget:
            batches.append([])
            longest = 0
        longest = max(longest, lengths[text])
        batches[-1].append(text)
    return batches


def packed_labels(texts):
    row = []
    for prompt, answer in texts:
        start = len(row)
        row += [-100] * len(prompt) + list(answer)
        row[start] = -100
    return row


def keeps_the_first(texts):
    return [label for prompt, answer in texts for label in [-100] * len(prompt) + list(answer)]


def learns_prompts(texts):
    return [label for prompt, answer in texts for label in [-100, *(prompt + answer)[1:]]]


RIGHT = {"10.1": budget_batches, "10.4": buckets, "10.2": packed_labels, "10.3": {"D", "E"}}
WRONG = {
    "10.1": [
        without_padding, partial(budget_batches, fresh=False), one_too_many,
        lambda lengths, order, budget: budget_batches(lengths, sorted(order), budget), 3,
    ],
    "10.4": [
        sorted_all, sorted_then_shuffled, partial(buckets, by_length=False),
        partial(buckets, mixed=False), drops_the_rest, lengths_not_rows,
        lambda *given: buckets(*given[:3], random.random()), [[0, 1]],
    ],
    "10.2": [
        keeps_the_first, learns_prompts, lambda texts: [],
        lambda texts: [max(0, label) for label in packed_labels(texts)], 3,
    ],
    "10.3": [
        {"A", "D", "E"}, {"B", "D"}, {"C", "D", "E"}, {"D"}, {"E"}, {"B", "D", "E"}, "DEF", 2,
        set(), {"D", "E", "F"},
    ],
}  # fmt: skip

"""Answers to the exercises of notebook 10, right and wrong."""

import random


def cut(rows, size):
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def buckets(lengths, batch_size, window, seed):
    generator = random.Random(seed)
    rows = list(range(len(lengths)))
    generator.shuffle(rows)
    batches = [
        batch
        for part in cut(rows, window * batch_size)
        for batch in cut(sorted(part, key=lengths.__getitem__), batch_size)
    ]
    generator.shuffle(batches)
    return batches


def sorted_all(lengths, batch_size, window, seed):
    return cut(sorted(range(len(lengths)), key=lengths.__getitem__), batch_size)


def sorted_then_shuffled(lengths, batch_size, window, seed):
    batches = sorted_all(lengths, batch_size, window, seed)
    random.Random(seed).shuffle(batches)
    return batches


def not_sorted(lengths, batch_size, window, seed):
    rows = list(range(len(lengths)))
    random.Random(seed).shuffle(rows)
    return cut(rows, batch_size)


def short_first(lengths, batch_size, window, seed):
    rows = list(range(len(lengths)))
    random.Random(seed).shuffle(rows)
    return [
        batch
        for part in cut(rows, window * batch_size)
        for batch in cut(sorted(part, key=lengths.__getitem__), batch_size)
    ]


def drops_the_rest(lengths, batch_size, window, seed):
    return [
        batch for batch in buckets(lengths, batch_size, window, seed) if len(batch) == batch_size
    ]


def other_seed(lengths, batch_size, window, seed):
    return buckets(lengths, batch_size, window, random.random())


def lengths_not_rows(lengths, batch_size, window, seed):
    return [[lengths[row] for row in batch] for batch in buckets(lengths, batch_size, window, seed)]


def budget_batches(lengths, order, budget):
    batches, longest = [], 0
    for text in order:
        longest = max(longest, lengths[text])
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[text]
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


def keeps_the_longest(lengths, order, budget):
    batches, longest = [], 0
    for text in order:
        longest = max(longest, lengths[text])
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
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


def in_their_own_order(lengths, order, budget):
    return budget_batches(lengths, range(len(lengths)), budget)


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


def with_zero(texts):
    return [0 if label == -100 else label for label in packed_labels(texts)]


RIGHT = {"10.1": budget_batches, "10.4": buckets, "10.2": packed_labels, "10.3": {"D", "E"}}
WRONG = {
    "10.1": [without_padding, keeps_the_longest, one_too_many, in_their_own_order, 3],
    "10.4": [
        sorted_all, sorted_then_shuffled, not_sorted, short_first, drops_the_rest,
        other_seed, lengths_not_rows, [[0, 1]],
    ],
    "10.2": [keeps_the_first, learns_prompts, with_zero, lambda texts: [], 3],
    "10.3": [
        {"A", "D", "E"}, {"B", "D"}, {"C", "D", "E"}, {"D"}, {"E"}, {"B", "D", "E"}, "DEF", 2,
        set(), {"D", "E", "F"},
    ],
}  # fmt: skip

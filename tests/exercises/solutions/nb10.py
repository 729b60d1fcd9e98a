"""Answers to the exercises of notebook 10, right and wrong."""

import random

import torch


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


def ignores_window(lengths, batch_size, window, seed):
    return buckets(lengths, batch_size, 10**6, seed)


def drops_the_rest(lengths, batch_size, window, seed):
    return [
        batch for batch in buckets(lengths, batch_size, window, seed) if len(batch) == batch_size
    ]


def other_seed(lengths, batch_size, window, seed):
    return buckets(lengths, batch_size, window, random.random())


def one_seed(lengths, batch_size, window, seed):
    return buckets(lengths, batch_size, window, 0)


def lengths_not_rows(lengths, batch_size, window, seed):
    return [[lengths[row] for row in batch] for batch in buckets(lengths, batch_size, window, seed)]


def longest_first(lengths, batch_size, window, seed):
    return sorted(
        buckets(lengths, batch_size, window, seed),
        key=lambda batch: -max(lengths[row] for row in batch),
    )


def put_back(values, batches):
    back = torch.empty_like(values)
    back[[row for batch in batches for row in batch]] = values
    return back


def inverse(values, batches):
    return values[[row for batch in batches for row in batch]]


def as_given(values, batches):
    return values


def in_place(values, batches):
    values[[row for batch in batches for row in batch]] = values.clone()
    return values


def within_batches(values, batches):
    out, start = [], 0
    for batch in batches:
        part = values[start : start + len(batch)]
        out.append(part[sorted(range(len(batch)), key=batch.__getitem__)])
        start += len(batch)
    return torch.cat(out)


RIGHT = {"10.1": 442800 / 234800, "10.4": buckets, "10.2": put_back, "10.3": {"D", "E"}}
WRONG = {
    "10.1": [1880 / 1080, 234800 / 442800, 2, 1.0, "1.89"],
    "10.4": [
        sorted_all,
        sorted_then_shuffled,
        not_sorted,
        short_first,
        ignores_window,
        drops_the_rest,
        other_seed,
        one_seed,
        lengths_not_rows,
        longest_first,
        [[0, 1]],
    ],
    "10.2": [inverse, as_given, in_place, within_batches, 3],
    "10.3": [
        {"A", "D", "E"},
        {"B", "D"},
        {"C", "D", "E"},
        {"D"},
        {"E"},
        {"B", "D", "E"},
        "DEF",
        2,
        set(),
        {"D", "E", "F"},
    ],
}

"""Answers to the exercises of notebook 18, right and wrong."""

from exercises.nb18 import break_even


def step_seconds(parameters, tokens, ranks, flops, speed):
    work = 6 * parameters * tokens / flops
    return max(work, 8 * parameters * (ranks - 1) / ranks / speed)


def nothing_hidden(parameters, tokens, ranks, flops, speed):
    work = 6 * parameters * tokens / flops
    return work + 8 * parameters * (ranks - 1) / ranks / speed


def whole_shards(parameters, tokens, ranks, flops, speed):
    return max(6 * parameters * tokens / flops, 8 * parameters / speed)


def first(states, example, memory, gpus):
    if states + example <= memory:
        return "ddp" if gpus > 1 else "one GPU"
    if gpus == 1:
        return "nothing"
    if states / gpus + example <= memory:
        return "fsdp"
    return "context" if (states + example) / gpus <= memory else "nothing"


def shards_examples(states, example, memory, gpus):
    if states + example <= memory:
        return "ddp" if gpus > 1 else "one GPU"
    return "fsdp" if gpus > 1 and (states + example) / gpus <= memory else "nothing"


def forgets_examples(states, example, memory, gpus):
    if states <= memory:
        return "ddp" if gpus > 1 else "one GPU"
    return "fsdp" if gpus > 1 and states / gpus <= memory else "nothing"


def always_one(states, example, memory, gpus):
    found = first(states, example, memory, gpus)
    return "one GPU" if found == "ddp" else found


def rows(states, per_row, ranks, share):
    return max(0, states * ((1 - 1 / ranks) / share - 1) / per_row)


RIGHT = {"18.1": step_seconds, "18.2": first, "18.3": rows, "18.4": break_even() * 1.03}
WRONG = {
    "18.1": [nothing_hidden, whole_shards, lambda *job: 0.0, 3],
    "18.2": [shards_examples, forgets_examples, always_one, lambda *job: "fsdp", len, 3],
    "18.3": [
        lambda states, per_row, ranks, share: max(0, states * (1 / share - 1) / per_row),
        lambda *job: 0,
        3,
    ],
    "18.4": [1.1e9, 11, break_even() / 1.5, break_even() * 1.5, "fast"],
}

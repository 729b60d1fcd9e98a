"""Answers to the exercises of notebook 18, right and wrong."""

from functools import partial

from exercises.nb18 import break_even
from tests.exercises import mistakes


def step_seconds(parameters, tokens, ranks, flops, speed, hidden=True, share=None):
    """With hidden=False messages wait for work; `share` of each tensor is sent (a ring's share)."""
    share = share or (ranks - 1) / ranks
    work, messages = 6 * parameters * tokens / flops, 8 * parameters * share / speed
    return max(work, messages) if hidden else work + messages


def first(states, example, memory, gpus, wrong=""):
    """`wrong` is the mistake that it makes."""
    example = 0 if wrong == "forgets examples" else example
    if states + example <= memory:
        return "ddp" if gpus > 1 else "one GPU"
    if gpus == 1:
        return "nothing"
    if (states + example * (gpus if wrong != "shards examples" else 1)) / gpus <= memory:
        return "fsdp"
    return "context" if not wrong and (states + example) / gpus <= memory else "nothing"


def always_one(states, example, memory, gpus):
    found = first(states, example, memory, gpus)
    return "one GPU" if found == "ddp" else found


def rows(states, per_row, ranks, share):
    return max(0, states * ((1 - 1 / ranks) / share - 1) / per_row)


RIGHT = {"18.1": step_seconds, "18.2": first, "18.3": rows, "18.4": break_even() * 1.03}
WRONG = {
    "18.1": [
        partial(step_seconds, hidden=False),
        partial(step_seconds, share=1),
        lambda *job: 0.0,
        3,
    ],
    "18.2": [
        *mistakes(first, "shards examples", "forgets examples"),
        always_one,
        lambda *job: "fsdp",
        len,
        3,
    ],
    "18.3": [
        lambda states, per_row, ranks, share: max(0, states * (1 / share - 1) / per_row),
        lambda *job: 0,
        3,
    ],
    "18.4": [1.1e9, 11, break_even() / 1.5, break_even() * 1.5, "fast"],
}

"""Answers to the exercises of notebook 18, right and wrong."""

from exercises.nb18 import break_even
from helpers.recipe import replace
from helpers.strategy.choose import SCENARIOS

JOB = SCENARIOS["two T4 GPUs"][0]


def crossing(parallel, per_machine):
    reach = {
        "tensor": parallel.tensor,
        "data": parallel.tensor * parallel.data,
        "pipeline": parallel.ranks,
    }
    return {
        axis for axis, ranks in reach.items() if getattr(parallel, axis) > 1 and ranks > per_machine
    }


def idle_too(parallel, per_machine):
    reach = {
        "tensor": parallel.tensor,
        "data": parallel.tensor * parallel.data,
        "pipeline": parallel.ranks,
    }
    return {axis for axis, ranks in reach.items() if ranks > per_machine}


def by_own_size(parallel, per_machine):
    return {
        axis for axis in ("tensor", "data", "pipeline") if getattr(parallel, axis) > per_machine
    }


def rows(states, per_row, ranks, share):
    return max(0, states * ((1 - 1 / ranks) / share - 1) / per_row)


def all_of_it(states, per_row, ranks, share):
    return max(0, states * (1 / share - 1) / per_row)


def of_what_is_left(states, per_row, ranks, share):
    return max(0, states * (1 - 1 / ranks) / share / per_row)


RIGHT = {
    "18.1": crossing,
    "18.2": replace(JOB, precision="fp16"),
    "18.3": rows,
    "18.4": break_even() * 1.03,
}
WRONG = {
    "18.1": [
        idle_too,
        by_own_size,
        lambda parallel, per_machine: {"pipeline"},
        lambda parallel, per_machine: ["data"],
        3,
    ],
    "18.2": [
        JOB,
        replace(JOB, precision="bf16"),
        replace(JOB, precision="tf32"),
        replace(JOB, accumulation=4),
        replace(JOB, precision="fp16", length=256),
        replace(JOB, precision="fp16", lora_rank=8),
        3,
    ],
    "18.3": [all_of_it, of_what_is_left, lambda states, per_row, ranks, share: 0, 3],
    "18.4": [1.1e9, 11, break_even() / 1.5, break_even() * 1.5, "fast"],
}

"""Answers to the exercises of notebook 07, right and wrong."""

import copy
from functools import partial

import torch

from tests.exercises import mistakes


def squeeze(delta, rank, alpha, wrong=""):
    """`wrong` is the mistake that it makes."""
    U, S, V = torch.linalg.svd(delta, full_matrices=False)
    A, B = V[:rank], U[:, :rank] * S[:rank] * rank / alpha
    return {
        "turned": (A.T, B.T),
        "swapped": (B, A),
        "both scaled": (A * rank / alpha, B),
        "the product": alpha / rank * B @ A,
    }.get(wrong, (A, B))


def merge(linear, A, B, alpha, wrong=""):
    """`wrong` is the mistake that it makes."""
    scale = 1 if wrong == "without scale" else alpha / A.shape[0]
    if wrong == "a function":
        return lambda x: linear(x) + scale * (x @ A.T) @ B.T
    merged = linear if wrong == "in place" else copy.deepcopy(linear)
    merged.weight.data += scale * (A.T @ B.T if wrong == "as given" else B @ A)
    if wrong == "loses the bias":
        merged.bias = None
    return merged


def forgotten(model, fresh, rule=all, recurse=True):
    modules = dict(model.named_modules())
    trains = {n: rule(p.requires_grad for p in modules[n].parameters(recurse)) for n in fresh}
    return sorted(name for name in fresh if not trains[name])


def by_how_names_begin(model, fresh):
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return sorted(n for n in fresh if not any(name.startswith(n) for name in trained))


RIGHT = {
    "07.1": 24 * 2 * 2 * 1024 * 16 + 1024 * 1024 + 1024 + 1024 * 20 + 20,
    "07.2": forgotten,
    "07.3": squeeze,
    "07.4": merge,
}
WRONG = {
    "07.1": [1_572_864, 1_593_364, 2_643_968, "2642964"],
    "07.2": [
        partial(forgotten, rule=any), partial(forgotten, recurse=False), by_how_names_begin,
        lambda model, fresh: [], lambda model, fresh: sorted(fresh), ["pooler"],
    ],
    "07.3": [
        *mistakes(squeeze, "turned", "swapped", "both scaled", "the product"),
        3,
    ],
    "07.4": [
        *mistakes(
            merge,
            "as given", "in place", "without scale", "loses the bias", "a function",
        ),
        3,
    ],
}  # fmt: skip

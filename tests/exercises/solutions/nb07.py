"""Answers to the exercises of notebook 07, right and wrong."""

import copy
from functools import partial

import torch
from torch import nn


def squeeze(delta, rank, alpha):
    U, S, V = torch.linalg.svd(delta, full_matrices=False)
    return V[:rank], U[:, :rank] * S[:rank] * rank / alpha


def turns_them(delta, rank, alpha):
    A, B = squeeze(delta, rank, alpha)
    return A.T, B.T


def swaps_them(delta, rank, alpha):
    A, B = squeeze(delta, rank, alpha)
    return B, A


def scales_both(delta, rank, alpha):
    A, B = squeeze(delta, rank, alpha)
    return A * rank / alpha, B


def product(delta, rank, alpha):
    A, B = squeeze(delta, rank, alpha)
    return alpha / rank * B @ A


def merge(linear, A, B, alpha):
    merged = copy.deepcopy(linear)
    merged.weight.data += alpha / A.shape[0] * B @ A
    return merged


def as_given(linear, A, B, alpha):
    linear.weight.data += A.T @ B.T
    return linear


def in_place(linear, A, B, alpha):
    linear.weight.data += alpha / A.shape[0] * B @ A
    return linear


def without_scale(linear, A, B, alpha):
    merged = copy.deepcopy(linear)
    merged.weight.data += B @ A
    return merged


def loses_the_bias(linear, A, B, alpha):
    merged = nn.Linear(linear.in_features, linear.out_features, bias=False)
    merged.weight.data = linear.weight.data + alpha / A.shape[0] * B @ A
    return merged


def a_function(linear, A, B, alpha):
    return lambda x: linear(x) + alpha / A.shape[0] * (x @ A.T) @ B.T


def forgotten(model, fresh, rule=all):
    modules = dict(model.named_modules())
    trains = {n: rule(p.requires_grad for p in modules[n].parameters()) for n in fresh}
    return sorted(name for name in fresh if not trains[name])


def of_itself_alone(model, fresh):
    modules = dict(model.named_modules())
    own = {n: [p.requires_grad for p in modules[n].parameters(recurse=False)] for n in fresh}
    return sorted(name for name in fresh if not all(own[name]))


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
        partial(forgotten, rule=any), of_itself_alone, by_how_names_begin,
        lambda model, fresh: [], lambda model, fresh: sorted(fresh), ["pooler"],
    ],
    "07.3": [turns_them, swaps_them, scales_both, product, 3],
    "07.4": [as_given, in_place, without_scale, loses_the_bias, a_function, 3],
}  # fmt: skip

"""Answers to the exercises of notebook 01, right and wrong."""

import torch

from helpers.recipe import difference, replace
from tests.exercises import mistakes

HEAD = ["classifier.bias", "classifier.weight"]


def transplant(model, tensors, wrong=""):
    """`wrong` is the mistake that it makes."""
    if wrong in ("not strict", "without prefix"):
        to = model.base_model if wrong == "not strict" else model
        to.load_state_dict(tensors, strict=False)
        return HEAD
    body = model.base_model.state_dict()
    for name, value in body.items():
        if name not in tensors or tensors[name].shape != value.shape:
            error = KeyError if wrong == "another error" else ValueError
            raise error(f"{'It' if wrong == 'names nothing' else name} does not fit.")
        if wrong == "checks on the way":
            value.copy_(tensors[name])
    for name, value in body.items():
        value.copy_(tensors[name])
    if wrong == "the head too":
        model.classifier.weight.data.zero_()
    return None if wrong == "says nothing" else HEAD


def nearest_label(train, labels, test):
    return labels[torch.cdist(test, train).argmin(1)]


def indices(train, labels, test):
    return torch.cdist(test, train).argmin(1)


def wrong_axis(train, labels, test):
    return labels[torch.cdist(test, train).argmin(0)]


def unfair(before, after):
    def in_force(recipe):
        return replace(
            recipe, weights="random", data=recipe.dataset, length=recipe.tokens,
            learning_rate=recipe.peak_learning_rate, accumulation=1, checkpointing=False,
        )  # fmt: skip

    return sorted(difference(in_force(before), in_force(after)))


def as_written(before, after):
    return sorted(set(difference(before, after)) - {"weights", "accumulation", "checkpointing"})


RIGHT = {"01.1": 10, "01.2": nearest_label, "01.3": transplant, "01.4": unfair}
WRONG = {
    "01.1": [9, 67, 8, 9.52, 11, "10"],
    "01.2": [indices, wrong_axis, 665],
    "01.3": [
        *mistakes(
            transplant,
            "not strict", "without prefix", "another error", "checks on the way",
            "the head too", "says nothing", "names nothing",
        ),
        3,
    ],
    "01.4": [
        as_written, lambda before, after: [],
        lambda before, after: set(unfair(before, after)), [],
    ],
}  # fmt: skip

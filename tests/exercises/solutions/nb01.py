"""Answers to the exercises of notebook 01, right and wrong."""

import torch

from helpers.recipe import difference, replace


def transplant(model, tensors):
    body = model.base_model.state_dict()
    for name, value in body.items():
        if name not in tensors:
            raise ValueError(f"{name} is absent from the checkpoint.")
        if tensors[name].shape != value.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensors[name].shape)}, and not {tuple(value.shape)}."
            )
    with torch.no_grad():
        for name, value in body.items():
            value.copy_(tensors[name])
    return sorted(
        name
        for name, _ in model.named_parameters()
        if not name.startswith(model.base_model_prefix + ".")
    )


def not_strict(model, tensors):
    model.base_model.load_state_dict(tensors, strict=False)
    return ["classifier.bias", "classifier.weight"]


def without_prefix(model, tensors):
    model.load_state_dict(tensors, strict=False)
    return ["classifier.bias", "classifier.weight"]


def wrong_error(model, tensors):
    model.base_model.load_state_dict(
        {name: tensors[name] for name in model.base_model.state_dict()}
    )
    return ["classifier.bias", "classifier.weight"]


def checks_on_the_way(model, tensors):
    for name, value in model.base_model.state_dict().items():
        if name not in tensors or tensors[name].shape != value.shape:
            raise ValueError(f"{name} does not fit.")
        value.copy_(tensors[name])
    return ["classifier.bias", "classifier.weight"]


def head_too(model, tensors):
    transplant(model, tensors)
    with torch.no_grad():
        model.classifier.weight.zero_()
    return ["classifier.bias", "classifier.weight"]


def says_nothing(model, tensors):
    transplant(model, tensors)


def names_nothing(model, tensors):
    try:
        return transplant(model, tensors)
    except ValueError:
        raise ValueError("The checkpoint does not fit.") from None


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
        not_strict, without_prefix, wrong_error, checks_on_the_way, head_too, says_nothing,
        names_nothing, 3,
    ],
    "01.4": [
        as_written, lambda before, after: [],
        lambda before, after: set(unfair(before, after)), [],
    ],
}  # fmt: skip

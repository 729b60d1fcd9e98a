"""Answers to the exercises of notebook 03, right and wrong."""

from tests.exercises import mistakes


def thaw(model, optimizer, names, wrong=""):
    """`wrong` is the mistake that it makes."""
    every = dict(model.named_parameters())
    if wrong == "thaws all":
        names = list(every)
    if wrong == "by prefix":
        first = min(int(name.split(".")[0]) for name in names) - 1
        names = [name for name in every if int(name.split(".")[0]) >= first]
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    new = [every[name] for name in names if id(every[name]) not in known]
    for parameter in new:
        parameter.requires_grad_(wrong != "forgets the gradient")
    now = {name: optimizer.param_groups[0][name] for name in ("lr", "weight_decay")}
    if wrong == "starts anew":
        optimizer.__init__([p for p in every.values() if p.requires_grad], **now)
    elif new and wrong != "forgets the optimizer":
        optimizer.add_param_group({"params": new, **now})


RIGHT = {"03.1": 98_380_800 * 12 / 2**30, "03.2": 14 / 36, "03.3": thaw, "03.4": 10}
WRONG = {
    "03.1": [0.73, 98_380_800 * 12, "1.1"],
    "03.2": [13 / 36, 15 / 36, 38.9],
    "03.3": [
        *mistakes(
            thaw,
            "forgets the optimizer", "forgets the gradient", "starts anew", "thaws all",
            "by prefix",
        ),
        3,
    ],
    "03.4": [9, 11, 25, 10.5],
}  # fmt: skip

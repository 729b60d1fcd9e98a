"""Answers to the exercises of notebook 03, right and wrong."""


def held(optimizer):
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def chosen(model, names):
    return [parameter for name, parameter in model.named_parameters() if name in names]


def thaw(model, optimizer, names):
    known = held(optimizer)
    new = [parameter for parameter in chosen(model, names) if id(parameter) not in known]
    for parameter in new:
        parameter.requires_grad_(True)
    if new:
        now = optimizer.param_groups[0]
        optimizer.add_param_group(
            {"params": new, "lr": now["lr"], "weight_decay": now["weight_decay"]}
        )


def forgets_the_optimizer(model, optimizer, names):
    for parameter in chosen(model, names):
        parameter.requires_grad_(True)


def forgets_the_gradient(model, optimizer, names):
    now = optimizer.param_groups[0]
    optimizer.add_param_group(
        {"params": chosen(model, names), "lr": now["lr"], "weight_decay": now["weight_decay"]}
    )


def starts_anew(model, optimizer, names):
    forgets_the_optimizer(model, optimizer, names)
    now = optimizer.param_groups[0]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer.__init__(trained, lr=now["lr"], weight_decay=now["weight_decay"])


def thaws_all(model, optimizer, names):
    thaw(model, optimizer, [name for name, _ in model.named_parameters()])


def by_prefix(model, optimizer, names):
    layers = {name.split(".")[0] for name in names}
    below = [
        name
        for name, _ in model.named_parameters()
        if int(name.split(".")[0]) >= min(map(int, layers)) - 1
    ]
    thaw(model, optimizer, below)


RIGHT = {"03.1": 98_380_800 * 12 / 2**30, "03.2": 14 / 36, "03.3": thaw, "03.4": 10}
WRONG = {
    "03.1": [0.73, 98_380_800 * 12, "1.1"],
    "03.2": [13 / 36, 15 / 36, 38.9],
    "03.3": [forgets_the_optimizer, forgets_the_gradient, starts_anew, thaws_all, by_prefix, 3],
    "03.4": [9, 11, 25, 10.5],
}  # fmt: skip

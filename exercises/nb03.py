"""Exercises of notebook 03: freezing."""

from __future__ import annotations

import torch

from exercises.check import exercise
from exercises.comparisons import close, same
from helpers.plan.planner import plan
from helpers.recipe import Recipe, replace
from helpers.units import GIB

GPU = "T4"
TEXT = Recipe("deberta", profile="full", batch_size=16, length=256, accumulation=4)
IMAGES = Recipe("vit", profile="full", batch_size=32)
LARGE = Recipe("deberta-large", profile="full", batch_size=16, length=256)


@exercise(
    "03.1",
    hints=[
        (
            "Optimizer states lie in the peak always. "
            "What else is alive when the second micro-batch reaches its peak?"
        ),
        (
            "Two moments and a gradient are twelve bytes per parameter, "
            "and 98 million parameters are frozen; a GiB is 2^30 bytes."
        ),
    ],
    why=(
        "What freezing saves depends on what is in the peak: "
        "accumulation brings the gradients into it"
    ),
)
def _(answer):
    close(
        answer,
        (plan(TEXT).peak - plan(replace(TEXT, frozen=0)).peak) / GIB,
        rel=0.03,
        unit="GiB",
        what="the saving",
    )


@exercise(
    "03.2",
    hints=[
        (
            "Count products of matrices: a trained layer does one in the forward pass "
            "and two in the backward pass."
        ),
        "Twelve layers go forward, one goes backward; all that, over thirty-six.",
    ],
    why="The forward pass is a third of a step, and freezing does not touch it",
)
def _(answer):
    left, whole = (sum(plan(replace(IMAGES, frozen=k)).flops.values()) for k in (11, None))
    close(answer, left / whole, rel=0.02, what="the share")


@exercise(
    "03.3",
    hints=[
        (
            "Two things have to change: the parameter must require a gradient, "
            "and the optimizer must know it (add_param_group)."
        ),
        (
            "A new group takes the optimizer's first defaults, not the learning rate of now; "
            "and a parameter may be in one group only."
        ),
    ],
    why=(
        "A thawed parameter that no optimizer holds gets gradients and never moves, "
        "without an error"
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of a model, an optimizer and names"
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    for layer in model[:3]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), lr=0.1, weight_decay=0.2)
    _step(model, optimizer)
    optimizer.param_groups[0].update(lr=0.03, weight_decay=0.05)  # as a schedule would
    moments = {key: value.clone() for key, value in optimizer.state[model[3].weight].items()}
    for names, thawed in (
        (["2.weight", "2.bias"], [2]),
        (["1.weight", "1.bias", "2.bias"], [1, 2]),
    ):
        answer(model, optimizer, names)
        for index, layer in enumerate(model):
            for name, parameter in layer.named_parameters():
                _check_parameter(
                    f"{index}.{name}", parameter, optimizer, trains=index in (3, *thawed)
                )
        if thawed == [2]:
            same(
                dict(optimizer.state[model[3].weight]),
                moments,
                what="the moments of what trained before",
            )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        _step(model, optimizer)
        moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters())]
        for index in range(4):
            wanted = index in (3, *thawed)
            assert moved[2 * index] == wanted, f"layer {index} " + (
                "does not move in the next step"
                if wanted
                else "moves in the next step, although nobody named it"
            )


@exercise(
    "03.4",
    hints=[
        (
            "Every frozen layer saves the same: plan frozen=0 and frozen=8, "
            "and draw the line to the GPU's memory."
        ),
        (
            "`plan(replace(recipe, frozen=k)).fits('T4')` also counts context, workspace, "
            "allocator and margin."
        ),
    ],
    why=(
        "The line makes a search out of two plans, "
        "and the embeddings alone are far from enough here"
    ),
)
def _(answer):
    assert isinstance(answer, int) and not isinstance(answer, bool), (
        "your answer should be a whole number of layers"
    )
    assert 0 <= answer <= LARGE.layers, f"DeBERTa-v3-large has {LARGE.layers} layers"
    fit = plan(replace(LARGE, frozen=answer)).fits(GPU)
    assert fit, f"with frozen={answer} the step {fit}"
    assert answer == 0 or not plan(replace(LARGE, frozen=answer - 1)).fits(GPU), (
        "one frozen layer fewer fits too"
    )


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _check_parameter(
    name: str, parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, trains: bool
) -> None:
    """Asserts that a parameter is what it should be, and in one group with today's settings."""
    assert parameter.requires_grad == trains, (
        f"{name} should {'' if trains else 'not '}require a gradient"
    )
    groups = [
        group
        for group in optimizer.param_groups
        if any(member is parameter for member in group["params"])
    ]
    held = sum(member is parameter for group in groups for member in group["params"])
    if trains:
        assert held == 1, f"the optimizer holds {name} {held} times and not once"
        for key, value in (("lr", 0.03), ("weight_decay", 0.05)):
            close(groups[0][key], value, rel=1e-6, what=f"{key} of {name}")
    else:
        assert held == 0, f"the optimizer holds {name}, which should stay frozen"

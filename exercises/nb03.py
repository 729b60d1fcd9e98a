"""Exercises of notebook 03: freezing."""

from __future__ import annotations

import torch

from exercises.check import exercise
from exercises.comparisons import close, same, whole_number
from exercises.handout import observe
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.units import GIB

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
    cases = ([2], ["2.weight", "2.bias"]), ([1, 2], ["1.weight", "1.bias", "2.bias"])
    seen = observe(_thawed, answer, [names for _, names in cases])
    moments = _thawed(None, [[]])[0]["moments"]
    for (thawed, _), after in zip(cases, seen, strict=True):
        for name, parameter in after["parameters"].items():
            _check_parameter(name, parameter, trains=int(name[0]) in (3, *thawed))
        if thawed == [2]:
            same(after["moments"], moments, what="the moments of what trained before")
        for index in range(4):
            wanted = index in (3, *thawed)
            assert after["moved"][index] == wanted, f"layer {index} " + (
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
    answer = whole_number(answer, "layers")
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


def _thawed(answer, requests: list[list[str]]) -> list[dict]:
    """Call the answer with each list of names in turn; after each, what there is, and a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    for layer in model[:3]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), lr=0.1, weight_decay=0.2)
    _step(model, optimizer)
    optimizer.param_groups[0].update(lr=0.03, weight_decay=0.05)  # as a schedule would
    seen = []
    for names in requests:
        if answer is not None:
            answer(model, optimizer, names)
        after = {
            "parameters": {
                name: _described(it, optimizer) for name, it in model.named_parameters()
            },
            "moments": {
                key: value.clone() for key, value in optimizer.state[model[3].weight].items()
            },
        }
        before = [layer.weight.detach().clone() for layer in model]
        _step(model, optimizer)
        after["moved"] = [not torch.equal(old, it.weight) for old, it in zip(before, model)]
        seen.append(after)
    return seen


def _described(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> dict:
    """Whether a parameter requires a gradient, how often groups hold it, and their settings."""
    members = [
        group
        for group in optimizer.param_groups
        for member in group["params"]
        if member is parameter
    ]
    settings = [{key: group[key] for key in ("lr", "weight_decay")} for group in members]
    return {"trains": parameter.requires_grad, "groups": settings}


def _check_parameter(name: str, seen: dict, trains: bool) -> None:
    """Asserts that a parameter is what it should be, and in one group with today's settings."""
    assert seen["trains"] == trains, f"{name} should {'' if trains else 'not '}require a gradient"
    held = len(seen["groups"])
    if trains:
        assert held == 1, f"the optimizer holds {name} {held} times and not once"
        for key, value in (("lr", 0.03), ("weight_decay", 0.05)):
            close(seen["groups"][0][key], value, rel=1e-6, what=f"{key} of {name}")
    else:
        assert held == 0, f"the optimizer holds {name}, which should stay frozen"

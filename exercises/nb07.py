"""Exercises of notebook 07: LoRA."""

from __future__ import annotations

import copy

import torch
from torch import nn

from exercises.check import exercise
from exercises.comparisons import same, whole_number
from exercises.handout import observe
from helpers import models
from helpers.recipe import Recipe
from tight_fit.trace.fake_mode import FakeTensorMode

LARGE = Recipe("deberta-large", profile="full", lora_rank=16)
SHAPES = ((6, 9, 2, 4.0), (9, 5, 3, 3.0), (7, 7, 1, 8.0))  # out, in, rank, alpha


@exercise(
    "07.1",
    hints=[
        (
            "An adapter beside a square matrix has 2 x 1,024 x 16 parameters, "
            "and there are two in each layer."
        ),
        (
            "48 adapters, then 1,024 x 1,024 + 1,024 for the pooler "
            "and 20 x 1,024 + 20 for the classifier."
        ),
    ],
    why="The new head is a large part of what trains, and of the file that is saved",
)
def _(answer):
    answer = whole_number(answer, "parameters")
    with FakeTensorMode():
        truth = sum(
            parameter.numel()
            for parameter in models.empty(LARGE).parameters()
            if parameter.requires_grad
        )
    assert answer == truth, f"{answer:,} parameters are too {'few' if answer < truth else 'many'}"


@exercise(
    "07.2",
    hints=[
        "dict(model.named_modules())[name] is the module; ask each of its parameters.",
        "A module is forgotten where not all(p.requires_grad for p in module.parameters()).",
    ],
    why="A new layer that stays random gives no error: the loss falls, only less far",
)
def _(answer):
    assert callable(answer), "your answer should be a function of a model and a list of names"
    for index, (case, model, fresh) in enumerate(_half_frozen()):
        modules = dict(model.named_modules())
        wanted = sorted(
            name
            for name in fresh
            if not all(parameter.requires_grad for parameter in modules[name].parameters())
        )
        given = observe(_forgotten, answer, index)
        assert isinstance(given, list), f"your function should return a list {case}"
        assert given == wanted, (
            f"your function names {', '.join(map(str, given)) or 'nothing'} {case}, "
            f"and {'another number of' if len(given) != len(wanted) else 'other'} modules "
            "have parameters that do not train"
        )


def _forgotten(answer, index: int):
    _, model, fresh = _half_frozen()[index]
    return answer(model, list(fresh))


def _half_frozen() -> list[tuple[str, nn.Module, tuple[str, ...]]]:
    """(what it is, a model with some parameters frozen, names of its new modules)."""

    def made(*trains: str) -> nn.Module:
        model = nn.ModuleDict(
            {
                "body": nn.Linear(4, 4),
                "pooler": nn.ModuleDict({"dense": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}),
                "pooler2": nn.Linear(4, 4),
                "classifier": nn.Linear(4, 2),
            }
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(name.startswith(part) for part in trains))
        return model

    fresh = ("pooler", "classifier")
    return [
        ("where all new layers train", made("pooler.", "classifier."), fresh),
        ("where the pooler is frozen", made("classifier."), fresh),
        ("where only a neighbour trains", made("pooler2.", "classifier."), fresh),
        ("where half of the pooler trains", made("pooler.dense", "classifier."), fresh),
        ("where only biases train", made("pooler.dense.bias", "classifier.bias"), fresh),
    ]


@exercise(
    "07.3",
    hints=[
        (
            "torch.linalg.svd gives U, S, V with delta = U @ diag(S) @ V; "
            "the best approximation keeps the first `rank` of each."
        ),
        "B = U[:, :rank] * S[:rank] and A = V[:rank]; then divide one of them by alpha / rank.",
    ],
    why=(
        "A fine-tune already paid for can be kept as a small file; how much it loses, "
        "the singular values say"
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of delta, rank and alpha"
    torch.manual_seed(7)
    for rows, columns, rank, alpha in SHAPES:
        case = f"for a change of shape ({rows}, {columns}) at rank {rank} with alpha {alpha:g}"
        delta = torch.randn(rows, columns)
        U, S, V = torch.linalg.svd(delta, full_matrices=False)
        given = answer(delta.clone(), rank, alpha)
        assert isinstance(given, (tuple, list)) and len(given) == 2, (
            f"your function should return two matrices, A and B, {case}"
        )
        A, B = given
        for name, matrix, shape in (("A", A, (rank, columns)), ("B", B, (rows, rank))):
            assert isinstance(matrix, torch.Tensor), f"{name} should be a tensor {case}"
            assert tuple(matrix.shape) == shape, (
                f"{name} has shape {tuple(matrix.shape)} and not {shape} {case}"
            )
        same(
            alpha / rank * B @ A,
            (U[:, :rank] * S[:rank]) @ V[:rank],
            rel=1e-4,
            atol=1e-4,
            what=f"alpha / rank * B @ A {case}",
        )


@exercise(
    "07.4",
    hints=[
        (
            "What should be added is alpha / rank * B @ A: look at its shape, its factor, "
            "and at what is written to."
        ),
        "Copy the layer first (copy.deepcopy), and add under torch.no_grad() or to weight.data.",
    ],
    why=(
        "On square matrices no error tells of a transposed product; "
        "with alpha = r a forgotten factor does not show"
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of linear, A, B and alpha"
    for bias in (True, False):
        for rows, columns, rank, alpha in SHAPES:
            case = f"for {columns} inputs, {rows} outputs, rank {rank}, alpha {alpha:g}"
            torch.manual_seed(rows)
            linear, A, B, x = (
                nn.Linear(columns, rows, bias=bias),
                torch.randn(rank, columns),
                torch.randn(rows, rank),
                torch.randn(4, columns),
            )
            before = copy.deepcopy((dict(linear.state_dict()), A, B))
            wanted = (linear(x) + alpha / rank * (x @ A.T) @ B.T).detach()
            seen = observe(_merged, answer, before[0], A, B, alpha, x)
            assert seen["linear"], f"your function should return an nn.Linear {case}"
            same(seen["after"], before, what="what your function was given, afterwards,")
            assert seen["new"], "your function should return a new layer"
            assert seen["bias"] == bias, (
                f"the merged layer should have {'a' if bias else 'no'} bias, as the old one"
            )
            same(
                seen["output"],
                wanted,
                rel=1e-4,
                atol=1e-4,
                what=f"the merged layer's output {case}",
            )


def _merged(answer, state: dict, A, B, alpha: float, x: torch.Tensor) -> dict:
    """What the answer makes of a layer with these tensors, and what it does to the layer."""
    rows, columns = state["weight"].shape
    linear = nn.Linear(columns, rows, bias="bias" in state)
    linear.load_state_dict(state)
    merged = answer(linear, A, B, alpha)
    after = (dict(linear.state_dict()), A, B)
    if not isinstance(merged, nn.Linear):
        return {"linear": False, "after": after}
    return {
        "linear": True,
        "after": after,
        "new": merged is not linear,
        "bias": merged.bias is not None,
        "output": merged(x).detach(),
    }

"""Exercises of notebook 00: bytes of one training step."""

from __future__ import annotations

import torch
from transformers import RobertaConfig

from exercises.check import exercise
from exercises.comparisons import close, same, whole_number
from exercises.handout import observe
from helpers.plan import plan
from helpers.recipe import Recipe, replace
from tight_fit.plans.model import plan_model
from tight_fit.units import GIB

IMAGES = Recipe("vit", profile="full", batch_size=32)
TEXT = Recipe("deberta", profile="full", batch_size=16, length=256)
KINDS = ("parameters", "gradients", "optimizer states")


@exercise(
    "00.1",
    hints=[
        "Ask plan(Recipe(...)).fits('T4') for a few batch sizes: which is the first not to fit?",
        "Halve the distance each time, between a size that fits and one that does not.",
    ],
    why="A search that would take an evening of out-of-memory errors is a few plans.",
)
def _(answer):
    answer = whole_number(answer, "images")
    assert answer >= 1, "a step has at least one image"
    fit = plan(replace(IMAGES, batch_size=answer)).fits("T4")
    assert fit, f"with {answer} images the step {fit}"
    assert not plan(replace(IMAGES, batch_size=answer + 1)).fits("T4"), "one image more fits too"


@exercise(
    "00.2",
    hints=[
        "Count in tensors of batch x length x width numbers: how many does a layer keep?",
        "16 tensors of 8 x 512 x 768 numbers of 4 bytes, in each of 12 layers.",
    ],
    why=(
        "An estimate by hand says in a minute about how large a step is; "
        "the plan also counts what dropout and the embeddings keep."
    ),
)
def _(answer):
    roberta = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    planned = plan_model(roberta, batch_size=8, length=512)
    close(answer, planned.at_peak["activations"] / GIB, rel=0.1, unit="GiB")


@exercise(
    "00.3",
    hints=[
        "Ask each parameter for numel(), element_size() and requires_grad.",
        (
            "A frozen parameter has neither gradient nor state; "
            "Adam's means have the parameter's dtype, "
            "and each trained tensor has a step counter of 4 bytes."
        ),
    ],
    why="Freezing and smaller types act on these three sums, and now you know by how much.",
)
def _(answer):
    assert callable(answer), "your answer should be a function of a model"
    for index, (name, model) in enumerate(_models()):
        given = observe(_counted, answer, index)
        assert isinstance(given, dict) and set(given) == set(KINDS), (
            f"your function should give a dict with the keys {', '.join(KINDS)}"
        )
        truth = _after_a_step(model)
        for kind in KINDS:
            same(given[kind], truth[kind], rel=0, atol=0, what=f"the bytes of {kind} for {name}")


@exercise(
    "00.4",
    hints=[
        (
            "With so few tokens, activations are next to nothing: "
            "which moment has the most of the rest?"
        ),
        "Gradients are complete when the backward pass ends; Adam keeps two numbers per parameter.",
    ],
    why=(
        "Which technique helps depends on which kind is large at the peak, "
        "and that changes with the batch size."
    ),
)
def _(answer):
    assert isinstance(answer, (tuple, list)) and len(answer) == 2, (
        "your answer should be a pair: a kind and a phase"
    )
    small = plan(replace(TEXT, batch_size=1, length=32))
    assert answer[0] in small.at_peak, f"the first should be one of {', '.join(small.at_peak)}"
    assert answer[1] in ("forward", "backward", "optimizer"), (
        "the second should be forward, backward or optimizer"
    )
    assert answer[0] == max(small.at_peak, key=small.at_peak.get), (
        f"another kind than {answer[0]} is larger at the peak"
    )
    assert answer[1] == small.peak_phase, f"the peak is not in the {answer[1]} phase"


def _counted(answer, index: int):
    return answer(_models()[index][1])


def _models():
    def small():
        return torch.nn.Sequential(
            torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)
        )

    frozen, mixed = small(), small()
    frozen[0].requires_grad_(False)
    mixed[2].to(torch.bfloat16)
    return [
        ("a model in fp32", small()),
        ("a model with a frozen layer", frozen),
        ("a model in bf16", small().to(torch.bfloat16)),
        ("a model with one layer in bf16", mixed),
    ]


def _after_a_step(model: torch.nn.Module) -> dict[str, int]:
    """The hand count after a real step. Every trained parameter gets a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    sum((parameter * 2).sum() for parameter in trained).backward()
    optimizer.step()

    def count(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    return {
        "parameters": count(model.parameters()),
        "gradients": count(parameter.grad for parameter in trained),
        "optimizer states": count(
            tensor for state in optimizer.state.values() for tensor in state.values()
        ),
    }

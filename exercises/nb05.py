"""Exercises of notebook 05: 8-bit optimizers."""

from __future__ import annotations

import math
import random

import torch
from torch import nn

from exercises.check import exercise
from exercises.comparisons import agree, letters, same
from helpers import models
from helpers.recipe import Recipe, replace

GPU = "RTX 4060 Laptop"  # of exercise 3


@exercise(
    "05.1",
    hints=[
        (
            "A tensor of fewer than 4,096 elements keeps 8 bytes for each; "
            "the others keep two bytes for each and two scales per block."
        ),
        (
            "A scale has 4 bytes, and a last block that is not full needs one as well: "
            "-(-n // 256) blocks."
        ),
    ],
    why="Below 4,096 elements there is little to save, and much to lose.",
)
def _(answer):
    agree(
        answer,
        _state_bytes,
        [
            ([(768, 3072)],),
            ([(768,), (64, 64)],),
            ([(63, 65), (4096,), (3, 7, 300)],),
            ([(4095,), (5000,)],),
            ([],),
        ],
        _some_shapes,
        rel=1e-9,
    )


def _state_bytes(shapes) -> int:
    total = 0
    for shape in shapes:
        count = math.prod(shape)
        total += 8 * count if count < 4096 else 2 * count + 8 * -(-count // 256)
    return total


def _some_shapes(rng: random.Random) -> tuple:
    return ([(rng.randint(1, 90), rng.randint(1, 200)) for _ in range(6)],)


@exercise(
    "05.2",
    hints=[
        (
            "Divide each block by its largest element, "
            "and mind the block whose largest element is zero."
        ),
        (
            "torch.bucketize(share, levels) gives the index of the first level "
            "that is not below the share."
        ),
    ],
    why=(
        "Rounded up, the second moment can shorten a step, and never lengthen it; "
        "no element of it becomes zero that was none."
    ),
)
def _(answer):
    assert callable(answer), "your answer should be a function of v, levels and block"
    codes = _unsigned_map()
    draw = torch.Generator().manual_seed(5)
    for shape, block in (((512,), 256), (((7, 100)), 256), ((3, 50), 64), ((1000,), 100)):
        values = torch.rand(shape, generator=draw) ** 12 * 1e-4
        values.view(-1)[:block] = 0
        case = f"for v of shape {tuple(shape)} in blocks of {block}"
        given = answer(values.clone(), codes.clone(), block)
        assert isinstance(given, (tuple, list)) and len(given) == 2, (
            "your function should return two tensors: the indices and the scales"
        )
        indices, scale = given
        assert isinstance(indices, torch.Tensor) and indices.dtype == torch.uint8, (
            f"the indices {case} should be a tensor of uint8"
        )
        assert indices.shape == values.shape, (
            f"the indices {case} should have the shape of v, and have {tuple(indices.shape)}"
        )
        blocks = -(-values.numel() // block)
        truth = torch.stack(
            [values.flatten()[i * block : (i + 1) * block].max() for i in range(blocks)]
        )
        same(scale, truth, rel=1e-6, atol=0, what=f"the scales {case}")
        spread = scale.repeat_interleave(block)[: values.numel()].view_as(values)
        back = codes[indices.int()] * spread
        assert (back >= values * (1 - 1e-5)).all(), (
            f"{case}, what comes back is somewhere smaller than v"
        )
        below = codes[(indices.int() - 1).clamp(min=0)] * spread
        assert ((below < values * (1 + 1e-5)) | (indices == 0) | (spread == 0)).all(), (
            f"{case}, an index is more than one code too large"
        )


def _unsigned_map() -> torch.Tensor:
    values = [0.0, 1.0]
    for exponent in range(-6, 1):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + 7) + 1)
        values += ((edges[:-1] + edges[1:]) / 2 * 10.0**exponent).tolist()
    return torch.tensor(sorted(values))


@exercise(
    "05.4",
    hints=[
        (
            "The manager remembers group and position: "
            "at which positions of the first group does DeBERTa have the weights "
            "of nn.Embedding modules?"
        ),
        (
            "Look up what the ViT's first group has at these positions, "
            "and leave out what has fewer than 4,096 elements: it is fp32 in any case."
        ),
    ],
    why=(
        "Nothing fails and nothing is said; the second fine-tune just takes more memory "
        "than it should."
    ),
)
def _(answer):
    assert isinstance(answer, (set, frozenset, list, tuple)), "your answer should be a set of names"
    answer = set(answer)
    deberta, vit = (models.build(Recipe(name, profile="mini")) for name in ("deberta", "vit"))
    known = dict(vit.named_parameters())
    strange = sorted(map(str, answer - set(known)))
    assert not strange, f"{strange[0]} is no parameter of the mini ViT"
    small = sorted(name for name in answer if known[name].numel() < 4096)
    assert not small, (
        f"{small[0]} has fewer than 4,096 elements, so it is fp32 without any override"
    )
    truth = _inherited(deberta, vit)
    assert answer <= truth, (
        f"{sorted(answer - truth)[0]} is not at the position of an embedding of DeBERTa"
    )
    assert answer == truth, "some tensor is missing"


def _inherited(first: nn.Module, second: nn.Module) -> set[str]:
    embeddings = {
        id(module.weight) for module in first.modules() if isinstance(module, nn.Embedding)
    }
    pairs = zip(_matrices(first), _matrices(second))
    return {
        name
        for (_, before), (name, parameter) in pairs
        if id(before) in embeddings and parameter.numel() >= 4096
    }


def _matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The first group: what has two or more dimensions, in the model's order."""
    return [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.ndim >= 2
    ]


LARGE = Recipe("deberta-large", profile="full", batch_size=4, length=128)
BASE = Recipe("deberta", profile="full", batch_size=16, length=256)
OFFERED = {
    "A": replace(LARGE, accumulation=4),
    "B": replace(LARGE, optimizer="adamw8bit"),
    "C": replace(BASE, optimizer="adamw8bit"),
    "D": replace(BASE, accumulation=2),
}
FIT = {"B", "D"}  # what fits the GPU; a test plans all four


@exercise(
    "05.3",
    hints=[
        (
            "What is largest at the peak: the states, or the activations? "
            "8 bits shrink the first, accumulation the second."
        ),
        (
            "Accumulation also brings something to the peak "
            "that a single micro-batch does not have there: all gradients."
        ),
    ],
    why="A technique helps against what it shrinks; so look first at what fills the GPU's memory.",
)
def _(answer):
    answer = letters(answer, "ABCD")
    right = sum((letter in answer) == (letter in FIT) for letter in OFFERED)
    assert right == len(OFFERED), f"you are right about {right} of the four recipes"

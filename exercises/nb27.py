"""Exercises of notebook 27: Eight bits: FP8."""

from __future__ import annotations

import torch

from exercises.check import exercise
from exercises.comparisons import agree, close, same
from exercises.handout import observe

LOW = torch.float8_e4m3fn


@exercise(
    "27.1",
    hints=[
        "The exponent's four bits are 1010, which is 10; 7 is taken off.",
        "2 ** (10 - 7) times 1 and the mantissa's eighths: 101 is five of them.",
    ],
    why="Between 8 and 16 there are only eight numbers",
)
def _(answer):
    close(answer, 13.0, rel=1e-6)


@exercise(
    "27.2",
    hints=[
        "The scale is 448 / numbers.abs().max(), and 0 / 0 needs a case of its own.",
        "(numbers.float() * scale).to(torch.float8_e4m3fn); for zeros any finite scale will do.",
    ],
    why="This is what is done to each operand of each product, in every step anew",
)
def _(answer):
    assert callable(answer), "your answer should be a function of a matrix"
    torch.manual_seed(27)
    for name, numbers in (
        ("small numbers", 1e-4 * torch.randn(8, 16)),
        ("large numbers", 1e6 * torch.randn(8, 16)),
        ("a matrix whose largest number is negative", torch.tensor([[0.5, -3.0], [1.0, 2.0]])),
        ("numbers in bf16", torch.randn(8, 16).bfloat16()),
        ("zeros", torch.zeros(4, 4)),
    ):
        given = observe(_pair, answer, numbers.clone())
        assert given is not None, "your function should return 8-bit numbers and a scale"
        low, scale = given
        assert isinstance(low, torch.Tensor) and low.dtype == LOW, (
            f"the numbers for {name} should be of torch.float8_e4m3fn"
        )
        most = numbers.float().abs().max()
        if most == 0:
            assert abs(float(scale)) < float("inf"), f"the scale for {name} should be finite"
            same(low.float(), torch.zeros(4, 4), what=f"the 8-bit numbers for {name}")
            continue
        close(float(scale), (448 / most).item(), rel=1e-3, what=f"the scale for {name}")
        wanted = (numbers.float() * float(scale)).to(LOW).float()
        same(low.float(), wanted, what=f"the 8-bit numbers for {name}")


def _pair(answer, numbers):
    """(8-bit numbers, scale) of an answer; None where it gives no pair."""
    given = answer(numbers)
    return given if isinstance(given, tuple) and len(given) == 2 else None


@exercise(
    "27.3",
    hints=[
        "A product has 2 * tokens * inputs * outputs FLOPs; in FP8 it takes half as long.",
        (
            "The casts move 3 * (tokens * inputs + inputs * outputs) bytes. Divide the time in "
            "bf16 by the sum of half of it and the time of the casts."
        ),
    ],
    why=(
        "For the two layers it gives 1.57 and 0.73, where torchao measured 1.39 and 0.80. Products "
        "grow with three sizes and casts with two: wide layers and many tokens gain."
    ),
)
def _(answer):
    h100 = (990e12, 3.35e12)
    agree(
        answer,
        _gain,
        [(4096, 8192, 16384, *h100), (1024, 2048, 1024, *h100), (16, 4096, 4096, *h100)],
        lambda rng: (*(2 ** rng.randint(5, 14) for _ in range(3)), 1e14, 10 ** rng.uniform(11, 13)),
        rel=1e-3,
    )


def _gain(tokens: int, inputs: int, outputs: int, rate: float, bandwidth: float) -> float:
    product = 2 * tokens * inputs * outputs / rate
    casts = sum(3 * numbers / bandwidth for numbers in (tokens * inputs, inputs * outputs))
    return product / (product / 2 + casts)

"""Answers to the exercises of notebook 27, right and wrong."""

import functools

import torch

from tests.exercises import mistakes

LOW = torch.float8_e4m3fn


def scaled(numbers, wrong=""):
    """`wrong` is the mistake that it makes."""
    numbers = numbers.float()
    most = (numbers if wrong == "by the largest" else numbers.abs()).max()
    scale = 448 / most if most > 0 or wrong == "no case for zero" else torch.tensor(1.0)
    return (numbers * scale).to(LOW), scale


def gain(tokens, inputs, outputs, rate, bandwidth, flops=2, moved=3, weights=True):
    product = flops * tokens * inputs * outputs / rate
    numbers = tokens * inputs + (inputs * outputs if weights else 0)
    return product / (product / 2 + moved * numbers / bandwidth)


RIGHT = {"27.1": 13.0, "27.2": scaled, "27.3": gain}
WRONG = {
    "27.1": [5.0, 10.5, 13 * 2**3, "13", 1.625],
    "27.2": [
        *mistakes(scaled, "no case for zero", "by the largest"),
        lambda numbers: (numbers.to(LOW), torch.tensor(1.0)),
        lambda numbers: (scaled(numbers)[0].float(), scaled(numbers)[1]),
        lambda numbers: scaled(numbers)[0],
    ],
    "27.3": [
        functools.partial(gain, flops=1), functools.partial(gain, moved=2),
        functools.partial(gain, weights=False), lambda *sizes: 1 / gain(*sizes), lambda *sizes: 2.0,
    ],
}  # fmt: skip

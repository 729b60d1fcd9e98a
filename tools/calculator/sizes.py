"""Sizes of storages as products: bytes = factor × examples^i × (tokens / 32)^j × rank^k.

Nearly every tensor of a training step has as its dimensions the examples of a micro-batch, the
tokens of an example, the rank of LoRA's adapters, and constants of the model. A step that is traced
with prime numbers for the first three shows the exponents by division.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

UNIT = 32  # tokens; attention kernels pad to multiples of it, so other lengths are not exact
EXAMPLES = (29, 31, 37, 41, 43)
UNITS = (11, 13, 7, 5)  # of a length: 352, 416, 224 and 160 tokens, which BERT's positions hold
RANKS = (23, 19, 17, 47, 53)


class Shape(NamedTuple):
    """The prime sizes of a traced step.

    examples  per micro-batch
    units     of 32 tokens per example; 1 where the length of a model is fixed
    rank      of LoRA; 1 without adapters
    """

    examples: int
    units: int
    rank: int


class Size(NamedTuple):
    """The size of a storage: `factor` bytes times powers of the sizes of a step."""

    factor: int
    examples: int
    units: int
    rank: int

    def at(self, shape: Shape) -> int:
        """Bytes at a shape."""
        powers = shape.examples**self.examples * shape.units**self.units * shape.rank**self.rank
        return self.factor * powers


def primes_for(constants: Iterable[int]) -> tuple[Shape, Shape]:
    """Two shapes of primes that divide none of a model's constants.

    Raises ValueError where there are no two.
    """
    values = [abs(value) for value in constants if value]
    rows = [
        [prime for prime in primes if all(value % prime for value in values)]
        for primes in (EXAMPLES, UNITS, RANKS)
    ]
    if any(len(row) < 2 for row in rows):
        raise ValueError("This model's sizes hold the primes of the calculator: give it others.")
    first, second = (Shape(*(row[place] for row in rows)) for place in range(2))
    return first, second


def size_of(count: int, shape: Shape) -> Size:
    """The product that a number of bytes is at a shape of primes."""
    powers = []
    for prime in shape:
        power = 0
        while prime > 1 and count and count % prime == 0:
            count //= prime
            power += 1
        powers.append(power)
    return Size(count, *powers)

"""The GPUs that can be pretended, and the variable that asks for one.

This module imports neither torch nor, before it is asked, `tight_fit.gpus`, which it helps to
change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tight_fit.gpus import GPU

MIB = 2**20
CONTEXT = 400 * MIB  # bytes that the driver keeps of each GPU


@dataclass(frozen=True)
class Card:
    """One kind of GPU.

    label       its name in `tight_fit.gpus`
    driver      the name that the driver gives
    processors  streaming multiprocessors
    cache       bytes of the second-level cache
    """

    label: str
    driver: str
    processors: int
    cache: int

    @property
    def gpu(self) -> GPU:
        """What `tight_fit.gpus` knows of it: memory in bytes, capability as (major, minor)."""
        from tight_fit import gpus

        return gpus.GPUS[self.label]


CARDS = {
    "T4": Card("T4", "Tesla T4", 40, 4 * MIB),
    "A100": Card("A100-40GB", "NVIDIA A100-SXM4-40GB", 108, 40 * MIB),
    "RTX4060": Card("RTX 4060 Laptop", "NVIDIA GeForce RTX 4060 Laptop GPU", 24, 32 * MIB),
}


def asked() -> tuple[Card, int] | None:
    """(card, number of GPUs) that this process shall pretend, None for none.

    TIGHT_FIT_REHEARSAL names a card and the number, as "T4:2". Raises ValueError for another text.
    """
    from tight_fit import gpus

    text = os.environ.get(gpus.REHEARSAL, "").strip()
    if not text:
        return None
    name, _, number = text.partition(":")
    if name not in CARDS or not (number or "1").isdigit() or not 1 <= int(number or 1) <= 8:
        raise ValueError(
            f"{gpus.REHEARSAL}={text!r} names no pretended GPU: use {', '.join(CARDS)}, "
            "and a colon and the number of GPUs (up to 8) for more than one."
        )
    return CARDS[name], int(number or 1)


def visible(count: int) -> int:
    """How many of `count` GPUs this process sees, by CUDA_VISIBLE_DEVICES."""
    from tight_fit import gpus

    given = os.environ.get(gpus.VISIBLE)
    if given is None:
        return count
    return min(count, len([part for part in given.split(",") if part.strip() not in ("", "-1")]))

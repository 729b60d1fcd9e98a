"""Whether a machine has room for a step that is to be measured, by the step's plan."""

from __future__ import annotations

from tight_fit.memory.plan import Plan

MEMORY_FRACTION = 0.8  # of the machine's memory, which plans may fill


def has_room(planned: Plan, memory: int) -> bool:
    """Whether a planned step is measured where so many bytes of memory are.

    `memory` is that of one GPU, or what the host has available.
    """
    return planned.peak <= MEMORY_FRACTION * memory

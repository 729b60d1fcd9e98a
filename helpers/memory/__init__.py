"""What lies in memory during a training step: traced storage by storage, measured, given back.

Names are imported when first asked for: a plan traces a step and needs no data sets to measure one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helpers.memory.cleanup import release
    from helpers.memory.measurement import Memory, measure

__all__ = ["Memory", "measure", "release"]

_HOMES = {
    "Memory": "helpers.memory.measurement",
    "measure": "helpers.memory.measurement",
    "release": "helpers.memory.cleanup",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

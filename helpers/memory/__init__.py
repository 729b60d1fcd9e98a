"""What lies in memory during a step: followed storage by storage, measured, and given back."""

from helpers.memory.measurement import Memory, measure, release

__all__ = ["Memory", "measure", "release"]

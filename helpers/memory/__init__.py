"""What lies in memory during a training step: traced storage by storage, measured, given back."""

from helpers.memory.cleanup import release
from helpers.memory.measurement import Memory, measure

__all__ = ["Memory", "measure", "release"]
